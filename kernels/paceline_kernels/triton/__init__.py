"""The operations as Triton kernels, for GPUs. They run on the CPU too, slowly, where `TRITON_INTERPRET=1` is set before
this package is imported.
"""

import triton

if triton.knobs.runtime.interpret:
    from paceline_kernels.triton import interpreting as interpreting
