# SPDX-License-Identifier: Apache-2.0
"""The timeline: where every device-second of a run went. None of these modules imports numpy, Ray or torch.

Metrics, trace and the report's timeline are pure functions of its intervals, in a live run and afterwards alike:

    Recorder --drain--> TimelineFile --> read_timeline
                |                             |
           step_metrics            step_metrics, to_trace
"""
