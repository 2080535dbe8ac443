"""From raw conversations and pictures to packed rows.

Nothing here imports deepspeed or torch.distributed.
"""
