import torch

torch.set_num_threads(1)  # small tensors: a second thread costs more than it brings
