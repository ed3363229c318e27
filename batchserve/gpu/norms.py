"""RMS norms as one kernel each; torch's compiler would make two of a norm with few rows."""

from __future__ import annotations

import torch

from batchserve.kernel_overlap import launch_options

NUM_WARPS = 8


def rms_norm(x: torch.Tensor, scale: torch.Tensor, eps: float, overlaps: bool) -> torch.Tensor:
    """Returns x [..., dim] / rms(x) * scale, contiguous and of x's dtype. scale: float32 [dim]."""
    from batchserve.gpu import kernels

    dim = x.shape[-1]
    rows = x.reshape(-1, dim)
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    out = rows.new_empty(rows.shape)
    if len(rows):
        block = 1 << (dim - 1).bit_length()
        kernels.normalise[(len(rows),)](
            rows,
            scale,
            out,
            dim,
            eps,
            rows.stride(0),
            BLOCK=block,
            num_warps=NUM_WARPS,
            enable_fp_fusion=True,
            **launch_options(overlaps=overlaps),
        )
    return out.view(x.shape)


norm_op = torch.library.custom_op(
    "batchserve::rms_norm",
    rms_norm,
    mutates_args=(),
    schema="(Tensor x, Tensor scale, float eps, bool overlaps) -> Tensor",
)


@norm_op.register_fake
def _shape_of(x: torch.Tensor, scale: torch.Tensor, eps: float, overlaps: bool) -> torch.Tensor:
    return x.new_empty(x.shape)


class RowNorm(torch.nn.Module):
    """Replaces an RMS norm by x / rms(x) * scale, where scale was computed from the norm's weight."""

    def __init__(self, weight: torch.nn.Parameter, scale: torch.Tensor, eps: float, *, overlaps: bool) -> None:
        super().__init__()
        self.weight = weight  # for code that reads it from the module
        self.scale = scale.detach().float().contiguous()
        self.eps, self.overlaps = eps, overlaps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.batchserve.rms_norm(x, self.scale, self.eps, self.overlaps)
        return out
