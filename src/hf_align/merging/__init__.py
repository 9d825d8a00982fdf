"""Methods that mix models in one basis.

Weights that are aligned come in, with what each method asks for besides: samples of inputs, shares, a base. Tensors by
name go out, computed as they are asked for.
"""
