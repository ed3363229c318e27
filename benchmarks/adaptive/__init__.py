"""What docs/adaptive.md claims of the adaptive decoding length, one program a claim.

    python -m benchmarks.adaptive.NAME [FOLDER] [--quick]

FOLDER holds recorded sets (as benchmarks.replay takes); results go to benchmarks/results/adaptive/.
"""

from batchserve.native.threads import apply_thread_policy

apply_thread_policy()  # before any module here imports torch
