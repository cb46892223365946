"""Every op that PyTorch has samples for, replayed with other data than it was recorded with.

| file | subject |
|---|---|
| `samples` | calls of ops from PyTorch's own test samples, and other data of the same meta |
| `layouts` | the same tensors in other storages, strides and lazy bits |
| `twins` | one call, eager and captured, compared |
| `beyond` | what ops do beyond their schemas and tags |
| `composites` | calls of all composite ops, by their schemas |
| `__main__` | slices of the sweep: `python -m tests.torch.sweep --help` |
"""
