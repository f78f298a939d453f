"""How rounds travel: in one process, shared memory, torch.distributed."""
