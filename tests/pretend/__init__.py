# SPDX-License-Identifier: Apache-2.0
"""An accelerator that only pretends, for a CPU build of PyTorch: what a GPU would punish becomes visible.

Tensors say `pretend:0` and hold real numbers, computed by the CPU. As on CUDA

- tensors of two devices do not mix, except scalars in elementwise operations;
- a blocking transfer, a value read by the host (`.item()`, `.tolist()`, a boolean index) and a synchronisation stall
  the device: they are counted by file and line (`record.py`);
- a copy to the host with `non_blocking=True` arrives at the next synchronisation, and the host's buffer holds garbage
  until then (`copies.py`);
- memory is bounded: more than the limit is a `torch.OutOfMemoryError` (`memory.py`);
- operations in float64, and masks given to attention, are noted: they are slow.

Simplifications: one device, one stream; a copy to the device reads the host's buffer at once; memory is the sum of
live storages, without fragmentation; attention is PyTorch's unfused one.

PyTorch has room for one such device per process and keeps it until the process ends, so tests run on it in a process of
their own: `process.py`. `python -m tests.pretend` prints the counts of every architecture.
"""
