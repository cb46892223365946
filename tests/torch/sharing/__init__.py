"""Random scripts about which tensors share memory: by what way, how that changes, and what the step does to it.

    python -m tests.torch.sharing --seed 7 --scripts 1

generates the scripts of 7, 8, ... up to the number, runs each eagerly and
captured, and prints those that differ, cut down to the lines that it takes.
After each call all that can be asked of the tensors is compared: their
values, gradients, strides and flags, and which of them share memory.

| module | subject |
|---|---|
| `generate` | a script from a seed |
| `look` | what a tensor is, as text |
| `shrink` | shorter scripts than one that differs |
"""
