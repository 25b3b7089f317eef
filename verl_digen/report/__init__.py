# SPDX-License-Identifier: Apache-2.0
"""`report.html`: one page about a run, in one file that needs no network.

Whatever a run has left in its folder is shown, and of what is missing a sentence says why. The size is bounded however
long the run is: steps are thinned out evenly, and the page says what it leaves out.
"""
