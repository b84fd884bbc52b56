"""A kernel of a network's forward: its class, arithmetic and memory traffic."""

from dataclasses import dataclass, replace

CONVOLUTION_3X3 = "convolution_3x3"
"""3x3 with stride 1, which libraries may compute by a Winograd transform."""
CONVOLUTION_1X1 = "convolution_1x1"
CONVOLUTION_LARGE = "convolution_large"
"""5x5 or larger with stride 1, which libraries may compute by a Fourier transform."""
CONVOLUTION = "convolution"
GROUPED = "grouped"
DEPTHWISE = "depthwise"
MATRIX = "matrix"
ATTENTION = "attention"
NORM = "norm"
ELEMENTWISE = "elementwise"

CONVOLUTIONS = (
    *(CONVOLUTION_3X3, CONVOLUTION_1X1, CONVOLUTION_LARGE),
    *(CONVOLUTION, GROUPED, DEPTHWISE),
)
MULTIPLIES = (*CONVOLUTIONS, MATRIX, ATTENTION)
"""Classes whose kernels multiply matrices."""
KINDS = (*MULTIPLIES, NORM, ELEMENTWISE)


@dataclass(frozen=True)
class Kernel:
    """One kernel of a forward. flops and activations are per image."""

    kind: str
    flops: float
    moved: float
    """Activation elements that it reads and writes."""
    weights: float = 0.0
    """Weight elements that it reads, for however many images."""
    side: float = 0.0
    """Smallest dimension of the matrices that it multiplies, except rows that grow with a batch."""
    rows: float = 0.0
    """Rows of its result per image; 0 if they do not limit it."""
    has_input_gradient: bool = True
    in_float32: bool = False
    """Whether automatic mixed precision computes it in float32."""

    def part(self, flops: float, moved: float, weights: float) -> "Kernel":
        return replace(
            self, flops=flops * self.flops, moved=moved * self.moved, weights=weights * self.weights
        )
