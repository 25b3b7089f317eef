# SPDX-License-Identifier: Apache-2.0
"""Questions that `digen` answers beside a run: doctor, plan, simulate, bench, score, export. No run imports this."""
