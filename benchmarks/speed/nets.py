"""The nets in plain PyTorch, for every contestant that trains with PyTorch.

Potluck takes the first two from here too, as a user would who brings his own modules. Its ResNets are its own; those
here have the same layers and the same initialisation, so that parameter counts, computation and scale agree.
"""

import torch
from torch import Tensor, nn

WIDTH = 16
BLOCKS = {
    "resnet10": (1, 1, 1, 1),
    "resnet14": (1, 1, 2, 2),
    "resnet18": (2, 2, 2, 2),
    "resnet22": (2, 2, 3, 3),
    "resnet26": (3, 3, 3, 3),
}


def mlp(inputs: int, classes: int) -> nn.Sequential:
    """The network called 2NN in the paper on FedAvg; 199,210 weights on images of 28 x 28."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(inputs, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, classes)
    )


def cnn(channels: int, classes: int) -> nn.Sequential:
    """The convolutional network that several frameworks ship for EMNIST, without its dropout; images of 28 x 28."""
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(9216, 128),
        nn.ReLU(),
        nn.Linear(128, classes),
    )


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut, which is a projection where there is a stride."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        projection = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.shortcut = nn.Identity() if stride == 1 else projection

    def forward(self, x: Tensor) -> Tensor:
        """The rectified sum of both branches."""
        h = self.norm1(self.conv1(x)).relu()
        return (self.norm2(self.conv2(h)) + self.shortcut(x)).relu()


class ResNet(nn.Module):
    """Four stages of basic blocks behind a 3x3 stem; a deeper net has all layers of a shallower one by name."""

    def __init__(self, blocks: tuple[int, ...], channels: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(channels, WIDTH, 3, padding=1, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU()
        )
        self.stages = nn.Sequential()
        inputs = WIDTH
        for stage, count in enumerate(blocks):
            outputs, stride = WIDTH * 2**stage, 1 if stage == 0 else 2
            first, others = Block(inputs, outputs, stride), [Block(outputs, outputs, 1) for _ in range(count - 1)]
            self.stages.append(nn.Sequential(first, *others))
            inputs = outputs
        self.head = nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Images (batch, channels, height, width) to logits (batch, classes)."""
        return self.head(self.stages(self.stem(x)).flatten(2).mean(2))


def build(name: str, shape: tuple[int, int, int], classes: int) -> nn.Module:
    """A net by name, for inputs of this shape (channels, height, width)."""
    channels, height, width = shape
    if name == "mlp":
        return mlp(channels * height * width, classes)
    if name == "cnn":
        return cnn(channels, classes)
    return ResNet(BLOCKS[name], channels, classes)


def first_net(name: str, shape: tuple[int, int, int], classes: int, seed: int) -> nn.Module:
    """The net that a federation starts from: for one seed the same in every contestant that uses it."""
    torch.manual_seed(seed)
    return build(name, shape, classes)


def parameter_count(net: nn.Module) -> int:
    """Trained numbers of a net."""
    return sum(parameter.numel() for parameter in net.parameters())
