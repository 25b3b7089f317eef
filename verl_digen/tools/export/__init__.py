# SPDX-License-Identifier: Apache-2.0
"""Ways out of a checkpoint: files for other tools (`digen export`) and pictures (`digen sample`). No Ray, no ranks.

saved_run.py    a run's folder -> one checkpoint, the config that it was trained with, its model
comfyui.py      names of an adapter in ComfyUI
policy.py       whole tensors -> tensors of networks, of an adapter, of both merged
formats.py      those -> folders of diffusers and peft, card  export_command.py   digen export
pictures.py     those -> a network that samples -> PNG, GIF   sample_command.py   digen sample
"""
