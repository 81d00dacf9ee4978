from .horde_loss import HORDELoss
