from sklearn.datasets import load_digits


def digits():
    inputs, labels = load_digits(return_X_y=True)
    x = (inputs / 16).astype("float32")
    return {"x_train": x[:1438], "y_train": labels[:1438], "x_test": x[1438:], "y_test": labels[1438:]}
