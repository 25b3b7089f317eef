# SPDX-License-Identifier: Apache-2.0
"""`report.html`: one page about a run, in one file that needs no network.

    curves       numbers of steps and distributions of rewards      }
    pictures     validation prompts over the steps, training groups } -> page: one dict -> JSON in the file -> page.js
    timelines    chosen steps                                       }
    summary      start, numbers and health, warnings                }

Whatever a run has left in its folder is shown, and of what is missing a sentence says why. The size is bounded however
long the run is: steps are thinned out evenly, and the page says what it leaves out.
"""
