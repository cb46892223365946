"""One step of the script that the goals are stated for, every way to run it."""

from steps.llama import llama
from steps.subject import WAYS
from steps.sweep import Sweep

SWEEP = Sweep(
    name="overhead",
    title="4 Llama blocks, TP + sequence parallel, fake group of 8, one thread",
    axis="step",
    subjects=lambda: iter([llama("Llama, TP + SP")]),
    quick=(0,),
    ways=WAYS,
)
