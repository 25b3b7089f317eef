# SPDX-License-Identifier: Apache-2.0
"""Ways out of a checkpoint: files for other tools (`digen export`) and pictures (`digen sample`). No Ray, no ranks.

saved_run.py    a run's folder -> one checkpoint, the config that it was trained with, its model
shards.py       files of all ranks -> whole tensors of a policy, one at a time
card.py         README.md of an export
comfyui.py      names of an adapter in ComfyUI
policy.py       whole tensors -> tensors of networks, of an adapter, of both merged
formats.py      those -> folders of diffusers and peft        export_command.py   digen export
pictures.py     those -> a network that samples -> PNG, GIF   sample_command.py   digen sample
partial.py      a folder that is whole or absent
"""
