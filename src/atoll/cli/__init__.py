"""Command line: one file per verb. Light verbs never import torch."""
