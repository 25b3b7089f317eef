# SPDX-License-Identifier: Apache-2.0
"""Check that the tests notice: wrong code, one fault at a time, and the test that goes red (`make mutations`)."""
