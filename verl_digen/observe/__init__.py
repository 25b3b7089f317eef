# SPDX-License-Identifier: Apache-2.0
"""What a person looks at: progress, metrics and pictures."""
