"""Random DTensor programs, and whether a capture of each is what eager is.

    python -m tests.torch.programs --seed 7 --programs 1

generates the programs of 7, 8, ... up to the number, runs each eagerly and
captured, and prints those that differ, cut down to the lines it takes.

| module | subject |
|---|---|
| `ops` | the ops that programs are made of |
| `generate` | a program from a seed |
| `twins` | a program, eager and captured, from the same state |
| `planted` | captures that are wrong in one way each |
| `shrink` | shorter programs than one that differs |
"""
