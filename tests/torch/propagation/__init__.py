"""Rote's propagation and DTensor's, asked the same questions.

    python -m tests.torch.propagation --op aten::gather --mesh 2

prints how the answers compare, and every question answered differently.

| module | subject |
|---|---|
| `samples` | the calls of `validation/src/samples/*.txt` |
| `questions` | placements for their tensors |
| `dtensor` | DTensor's answer to a question |
| `engine` | Rote's answer |
| `pieces` | what each rank holds of a tensor, and the way back |
| `judge` | whether an op run on pieces gives the whole |
| `compare` | the classes of answers |
| `calls` | the calls that the samples of PyTorch's own op tests make |
| `torch_calls` | Rote's answers about these, held against PyTorch |
| `schemas` | PyTorch's schemas, as Rote has them |
"""
