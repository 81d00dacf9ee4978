from .jrs_loss import JRSLoss
