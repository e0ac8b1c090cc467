import torch
from fluke.data.datasets import DataContainer
from sklearn.datasets import load_digits


def Digits(path=None):
    inputs, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(inputs / 16).float(), torch.tensor(labels)
    return DataContainer(x[:1438], y[:1438], x[1438:], y[1438:], num_classes=10)
