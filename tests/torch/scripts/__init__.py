"""Random scripts that keep a value somewhere and change it, and whether a captured step sees each change.

    python -m tests.torch.scripts --seed 7 --scripts 1

generates the scripts of 7, 8, ... up to the number, runs each eagerly and
captured, and prints those that differ, cut down to what it takes.

| module | subject |
|---|---|
| `places` | where a value is kept, and how it gets there |
| `holders` | where what keeps the value is itself kept |
| `reads` | how the step reads it |
| `changes` | which values there are, how one replaces another, and when |
| `generate` | a script from a seed or a name |
| `twins` | a script, eager and captured |
| `shrink` | plainer scripts than one that differs |
| `corpus` | scripts that were wrong once |
"""
