# SPDX-License-Identifier: Apache-2.0
"""What a run would take on a cluster, from a profile of its model: `digen simulate`."""
