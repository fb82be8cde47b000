"""Words for humans: one file per verb. Light verbs never import torch."""
