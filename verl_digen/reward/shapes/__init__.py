# SPDX-License-Identifier: Apache-2.0
"""A drawn world with captions, and the rule that says how well a picture shows its caption.

`scene` holds the world (scenes, captions, drawings), `scorer` the reward.
"""
