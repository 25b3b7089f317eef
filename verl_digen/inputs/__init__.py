# SPDX-License-Identifier: Apache-2.0
"""Images and sound: references, tables of images, sizes, data sets of the hub."""
