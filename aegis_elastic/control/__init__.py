"""The control plane: a master that feeds `core` and performs its effects, and the processes around it. No
torch.
"""
