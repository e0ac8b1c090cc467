from copy import deepcopy

from fluke.algorithms import CentralizedFL
from fluke.client import Client


class ProxClient(Client):
    def __init__(self, *args, mu=0.3, **kwargs):
        super().__init__(*args, **kwargs)
        self.hyper_params.update(mu=mu)

    def fit(self, override_local_epochs=0):
        sent = deepcopy(self.model).to(self.device)
        self.model.to(self.device).train()
        if self.optimizer is None:
            self.optimizer, self.scheduler = self._optimizer_cfg(self.model)
        epochs, total = override_local_epochs or self.hyper_params.local_epochs, 0.0
        for _ in range(epochs):
            for x, y in self.train_set:
                self.optimizer.zero_grad()
                loss = self.hyper_params.loss_fn(self.model(x.to(self.device)), y.to(self.device))
                pairs = zip(self.model.parameters(), sent.parameters())
                loss = loss + self.hyper_params.mu / 2 * sum(((w - s) ** 2).sum() for w, s in pairs)
                loss.backward()
                self._clip_grads(self.model)
                self.optimizer.step()
                total += loss.item()
            self.scheduler.step()
        self.model.cpu()
        return total / (epochs * len(self.train_set))


class Prox(CentralizedFL):
    def get_client_class(self):
        return ProxClient
