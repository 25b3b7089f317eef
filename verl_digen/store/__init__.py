# SPDX-License-Identifier: Apache-2.0
"""TransferQueue, which carries samples from agent loops to trainer ranks. No other room calls it.

| partition | key | holds | written by | cleared by |
| --- | --- | --- | --- | --- |
| TRAIN | `SampleName.key` | a trajectory, its reward and tag | agent loop worker | trainer, at the end of the step |
| TRAIN, VAL | a group's uid | the prompt's status | trainer, then agent loop worker | replay buffer, validation |
| VAL | `SampleName.key` | a sample's tag | agent loop worker | validation |
| CONDITIONS | see `store.conditions` | a prompt's conditions | agent loop worker | trainer, at the end of the step |
"""
