"""The boosted prior of the paper: the losses of a component, the weights, the fit, the penalties."""
