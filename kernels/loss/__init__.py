from kernels.loss.head import among_candidates, head_loss, head_loss_reference

__all__ = ["among_candidates", "head_loss", "head_loss_reference"]
