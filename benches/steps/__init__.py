"""Training steps, the ways to run them, and how they are measured.

- `subject`: a step to measure, and each way to run it as a row
- `llama`, `networks`: the models
- `floor`: what a step's kernels cost by themselves
- `measure`: times, recording cost, plan size
- `memory`: bytes that a step holds at its peak
- `sent`: bytes that a rank sends in a step
- `sweep`: a series of subjects measured alike
- `report`: tables, plots and raw numbers
"""
