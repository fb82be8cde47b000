"""ResNet-18 and VGG-11 for small images (28 … 64 pixels a side), gray or color, with batch norm.

ResNet-18 (He et al. 2016) with its first layer for CIFAR: 3 x 3, no pooling. VGG-11 (Simonyan & Zisserman 2015, A)
with batch norm and one linear layer after the pooling instead of three.
Running statistics are float buffers: peers average them, so they describe the data of all peers; counters take the
maximum. A coarse codec may decode a variance below zero, which counts as zero: prefer int8 or finer.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional

# B batch, C channels, H and W pixels

VGG_SIDE = 32  # pixels needed for five halvings; smaller images get a black border


class VisionSize(NamedTuple):
    classes: int
    channels: int
    width: int  # of the first layer; both papers have 64


class ResidualBlock(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = nn.Sequential()
        if stride != 1 or before != width:
            self.downsample.extend([nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width)])

    def forward(self, x_BCHW: Tensor) -> Tensor:
        h = functional.relu(batch_normed(self.bn1, self.conv1(x_BCHW)))
        h = batch_normed(self.bn2, self.conv2(h))
        if len(self.downsample):
            x_BCHW = batch_normed(self.downsample[1], self.downsample[0](x_BCHW))
        return functional.relu(h + x_BCHW)


class ResNet18(nn.Module):
    def __init__(self, size: VisionSize) -> None:
        super().__init__()
        self.size = size
        widths = [size.width * 2**stage for stage in range(4)]
        self.conv1 = nn.Conv2d(size.channels, size.width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(size.width)
        self.stages = nn.ModuleList(
            nn.Sequential(
                ResidualBlock(widths[max(0, stage - 1)], width, 1 if stage == 0 else 2),
                ResidualBlock(width, width, 1),
            )
            for stage, width in enumerate(widths)
        )
        self.fc = nn.Linear(widths[-1], size.classes)
        initialize_convolutions(self)

    def forward(self, images: Tensor) -> Tensor:
        """Scores per class, (B, classes)."""
        h = functional.relu(batch_normed(self.bn1, self.conv1(as_planes(images, self.size.channels))))
        for stage in self.stages:
            h = stage(h)
        return self.fc(h.mean((2, 3)))


class VGG11(nn.Module):
    def __init__(self, size: VisionSize) -> None:
        super().__init__()
        self.size = size
        w = size.width
        self.stages = nn.ModuleList()  # each ends with a halving
        before = size.channels
        for widths in ((w,), (2 * w,), (4 * w, 4 * w), (8 * w, 8 * w), (8 * w, 8 * w)):
            stage = nn.ModuleList()
            for width in widths:
                stage.append(nn.Sequential(nn.Conv2d(before, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)))
                before = width
            self.stages.append(stage)
        self.fc = nn.Linear(before, size.classes)
        initialize_convolutions(self)

    def forward(self, images: Tensor) -> Tensor:
        """Scores per class, (B, classes)."""
        h = as_planes(images, self.size.channels)
        short, narrow = (max(0, VGG_SIDE - side) for side in h.shape[2:])
        h = functional.pad(h, (narrow // 2, narrow - narrow // 2, short // 2, short - short // 2))
        for stage in self.stages:
            assert isinstance(stage, nn.ModuleList)
            for block in stage:
                assert isinstance(block, nn.Sequential)
                convolution, norm = block
                h = functional.relu(batch_normed(norm, convolution(h)))
            h = functional.max_pool2d(h, 2)
        return self.fc(h.mean((2, 3)))


def as_planes(images: Tensor, channels: int) -> Tensor:
    """(B, C, H, W) of images (B, H, W) or (B, H, W, C). ValueError for another number of channels."""
    x = images.unsqueeze(1) if images.dim() == 3 else images.movedim(3, 1)
    if x.shape[1] != channels:
        raise ValueError(f"this model reads images of {channels} channels; these have {x.shape[1]}")
    return x


def batch_normed(norm: nn.Module, x_BCHW: Tensor) -> Tensor:
    """Batch norm that tolerates a negative variance in the running statistics."""
    assert isinstance(norm, nn.BatchNorm2d)
    if norm.training:
        return norm(x_BCHW)
    assert norm.running_var is not None
    variance_C = norm.running_var.clamp(min=0)
    return functional.batch_norm(x_BCHW, norm.running_mean, variance_C, norm.weight, norm.bias, eps=norm.eps)


def initialize_convolutions(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
