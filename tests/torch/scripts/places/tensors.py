"""Tensors, modules, optimizers and what belongs to them."""

# ruff: noqa: E501 (a table)
from .place import Place, attribute_of, class_

PLACES: dict[str, Place] = {
    "tensor": attribute_of("torch.ones", make="torch.ones(1)"),
    "parameter": attribute_of("nn.Parameter", make="nn.Parameter(torch.ones(1))"),
    "buffer": attribute_of("nn.Buffer", make="nn.Buffer(torch.ones(1))"),
    "tensor_subclass": attribute_of("Marked", class_("Marked", "torch.Tensor"), make="torch.ones(1).as_subclass(Marked)"),
    "tensor_class": Place(
        "torch.ones(1).as_subclass(Marked)", "$H.scale", "Marked.scale = $V",
        "class Marked(torch.Tensor):\n    scale = $V0\n", delete="del Marked.scale", attribute=("$H", "scale"),
        patches={"own": "$H.scale = $V", "type": "$H.__class__ = type('Other', (torch.Tensor,), {'scale': $V})"},
    ),
    "tensor_slot": attribute_of(
        "Marked", class_("Marked", "torch.Tensor", '__slots__ = ("scale",)'), make="torch.ones(1).as_subclass(Marked)"
    ),
    "tensor_list": Place(
        "with_scale(torch.ones(1), [$V])", "$H.scale[0]", "$H.scale[0] = $V", entries="$H.scale",
        patches={"replace": "$H.scale = [$V]", "insert": "$H.scale.insert(0, $V)"},
    ),
    "tensor_grad": Place(
        "with_grad($V)", "$H.grad.scale", "$H.grad.scale = $V",
        "def with_grad(value):\n    w = nn.Parameter(torch.ones(1))\n    w.grad = with_scale(torch.ones(1), value)\n"
        "    return w\n",
        patches={"replace": "$H.grad = with_scale(torch.ones(1), $V)"},
    ),
    "tensor_requires": Place("torch.ones(1)", "2.0 if $H.requires_grad else 3.0", "$H.requires_grad_()", takes="none"),
    "tensor_has_grad": Place("nn.Parameter(torch.ones(1))", "2.0 if $H.grad is None else 3.0",
                             "$H.grad = torch.ones(1)", takes="none"),
    "tensor_shape": Place("torch.ones(2)", "float($H.shape[0])", "$H.resize_(3)", takes="none",
                          patches={"data": "$H.data = torch.ones(4)", "set": "$H.set_(torch.ones(5))",
                                   "squeeze": "$H.unsqueeze_(0)"}),
    "tensor_dtype": Place("torch.ones(2)", "$H.element_size()", "$H.data = torch.ones(2, dtype=torch.float64)", takes="none"),
    "tensor_stride": Place("torch.ones(2, 3)", "float($H.stride(0))", "$H.t_()", takes="none",
                           patches={"set": "$H.as_strided_((2, 3), (1, 1))"}),
    "tensor_hooks": Place("nn.Parameter(torch.ones(1))", "9.0 + len($H._backward_hooks or ())",
                          "$H.register_hook(lambda g: g)", takes="none"),
    "tensor_leaf": Place("torch.ones(1).requires_grad_()", "2.0 if $H.is_leaf else 3.0", "$H.detach_().requires_grad_(False)", takes="none"),
    "tensor_equal": Place("[torch.ones(1), torch.ones(1)]", "2.0 if $H[0] is $H[1] else 3.0", "$H[1] = $H[0]", takes="none"),
    "module_training": Place("nn.Dropout(0.5)", "2.0 if $H.training else 3.0", "$H.eval()", takes="none"),
    "module_buffers": Place("nn.Linear(2, 2)", "float(len(list($H.buffers())))", "$H.register_buffer('b', torch.ones(1))",
                            takes="none", patches={"parameter": "$H.register_parameter('c', None)",
                                                   "child": "$H.add_module('d', nn.Identity())"}),
    "module_names": Place("nn.Sequential(nn.Identity())", "float(len(list($H.named_modules())))",
                          "$H.append(nn.Identity())", takes="none"),
    "state_dict": Place("with_buffer($V)", "len($H.state_dict())", "$H.register_buffer('c', torch.ones(1))",
                        "def with_buffer(value):\n    made = nn.Identity()\n    made.register_buffer('b', torch.ones(1))\n"
                        "    return made\n", takes="none"),
    "extra_state": Place("Layer($V)", "$H.get_extra_state()", "$H.kept = $V",
                         "class Layer(nn.Module):\n    def __init__(self, value):\n        super().__init__()\n"
                         "        self.kept = value\n\n    def get_extra_state(self):\n        return self.kept\n"),
    "parametrized": Place("parametrized($V)", "$H.parametrizations.weight[0].scale",
                          "$H.parametrizations.weight[0].scale = $V",
                          "class Scale(nn.Module):\n    def forward(self, x):\n        return x\n\n\n"
                          "def parametrized(value):\n    made = nn.Linear(1, 1)\n"
                          "    nn.utils.parametrize.register_parametrization(made, 'weight', with_scale(Scale(), value))\n"
                          "    return made\n"),
    "storage_view": Place(
        "with_scale(torch.ones(2)[1:], $V)", "$H.scale", "$H.scale = $V", attribute=("$H", "scale"),
    ),
    "module": attribute_of("nn.Identity"),
    "module_class": Place(
        "Layer()", "$H.scale", "Layer.scale = $V", "class Layer(nn.Module):\n    scale = $V0\n",
        attribute=("$H", "scale"), patches={"own": "$H.scale = $V"}, delete="del Layer.scale",
    ),
    "module_forward": Place(
        "Layer($V)", "$H(1.0)", "$H.factor = $V",
        "class Layer(nn.Module):\n    def __init__(self, value):\n        super().__init__()\n"
        "        self.factor = value\n\n    def forward(self, x):\n        return x * self.factor\n",
        patches={"forward": "$H.forward = lambda x: $V", "class": "Layer.forward = lambda self, x: $V",
                 "call": "Layer.__call__ = lambda self, x: $V", "type": "$H.__class__ = nn.Identity"},
        takes="number",
    ),
    "sequential": Place(
        "nn.Sequential(Layer($V), nn.Identity())", "$H(1.0)", "$H[0].factor = $V",
        "class Layer(nn.Module):\n    def __init__(self, value):\n        super().__init__()\n"
        "        self.factor = value\n\n    def forward(self, x):\n        return x * self.factor\n",
        patches={"child": "$H[0] = Layer($V)", "append": "$H.append(Layer($V))", "forward": "$H[1].forward = lambda x: $V"},
        takes="number",
    ),
    "module_list": Place(
        "nn.ModuleList([with_scale(nn.Identity(), $V)])", "sum(m.scale for m in $H)", "$H[0].scale = $V",
        patches={"append": "$H.append(with_scale(nn.Identity(), $V))", "child": "$H[0] = with_scale(nn.Identity(), $V)",
                 "delete": "del $H[0]"},
        takes="number",
    ),
    "module_dict": Place(
        "nn.ModuleDict({'a': with_scale(nn.Identity(), $V)})", "$H['a'].scale", "$H['a'].scale = $V",
        patches={"add": "$H['b'] = nn.Identity()", "child": "$H['a'] = with_scale(nn.Identity(), $V)",
                 "delete": "del $H['a']"},
    ),
    "parameter_dict": Place(
        "nn.ParameterDict({'a': with_scale(nn.Parameter(torch.ones(1)), $V)})", "$H['a'].scale", "$H['a'].scale = $V",
        patches={"other": "$H['a'] = with_scale(nn.Parameter(torch.ones(1)), $V)", "plain": "$H['b'] = $V"},
    ),
    "parameter_list": Place(
        "nn.ParameterList([torch.ones(1)])", "$H[0].scale", "$H[0].scale = $V", undo="",
        patches={"append": "$H.append(torch.ones(1))"},
    ),
    "hook": Place(
        "hooked($V)", "$H(1.0)", "$H.cell[0] = $V",
        "def hooked(value):\n    module = nn.Identity()\n    module.cell = [value]\n    cell = module.cell\n"
        "    module.register_forward_hook(lambda module, args, output: output * cell[0])\n    return module\n",
        patches={"remove": "$H._forward_hooks.clear()",
                 "add": "$H.register_forward_hook(lambda module, args, output: $V)",
                 "exchange": "$H._forward_hooks[next(iter($H._forward_hooks))] = lambda module, args, output: $V",
                 "dict": "$H._forward_hooks = collections.OrderedDict({7: lambda module, args, output: $V})",
                 "pre": "$H.register_forward_pre_hook(lambda module, args: (2.5,))"},
        takes="number",
    ),
    "optimizer_group": Place(
        "torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)", "$H.param_groups[0].get('scale', 9.0)",
        "$H.param_groups[0]['scale'] = $V", item=("$H.param_groups[0]", '"scale"'),
        patches={"lr": "$H.param_groups[0]['lr'] = $V", "replace": "$H.param_groups[0] = {**$H.param_groups[0], 'scale': $V}",
                 "add": "$H.add_param_group({'params': [nn.Parameter(torch.ones(1))], 'scale': $V})"},
    ),
    "optimizer_lr": Place(
        "torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=$V)", "$H.param_groups[0]['lr']",
        "$H.param_groups[0]['lr'] = $V", item=("$H.param_groups[0]", '"lr"'), takes="positive",
        patches={"defaults": "$H.defaults['lr'] = $V", "groups": "$H.param_groups = [{**$H.param_groups[0], 'lr': $V}]"},
    ),
    "optimizer_state": Place(
        "with_state($V)", "$H.state[$H.param_groups[0]['params'][0]]['scale']",
        "$H.state[$H.param_groups[0]['params'][0]]['scale'] = $V",
        "def with_state(value):\n    w = nn.Parameter(torch.ones(1))\n    opt = torch.optim.SGD([w], lr=0.1)\n"
        "    opt.state[w]['scale'] = value\n    return opt\n",
        patches={"clear": "$H.state.clear()"},
    ),
    "optimizer_attribute": attribute_of("torch.optim.SGD", make="torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)"),
    "scheduler": Place(
        "scheduled()", "$H.get_last_lr()[0]", "$H.step()",
        "def scheduled():\n    opt = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5)\n"
        "    return torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)\n", takes="none",
    ),
    "scheduler_rate": Place(
        "scheduled()", "$H.optimizer.param_groups[0]['lr']", "$H.step()",
        "def scheduled():\n    opt = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5)\n    opt.step()\n"
        "    return torch.optim.lr_scheduler.LambdaLR(opt, lambda epoch: 1.0 / (epoch + 1))\n", takes="none",
    ),
    "autograd_function": Place(
        "Scaled", "$H.scale", "$H.scale = $V",
        "class Scaled(torch.autograd.Function):\n    scale = $V0\n\n    @staticmethod\n    def forward(ctx, x):\n"
        "        return x * Scaled.scale\n\n    @staticmethod\n    def backward(ctx, g):\n        return g * Scaled.scale\n",
        attribute=("$H", "scale"), delete="del $H.scale", takes="number",
    ),
    "custom_op": Place(
        "[$V]", "custom($H)", "$H[0] = $V",
        "def custom(cell):\n    @torch.library.custom_op('rote_scripts::scaled', mutates_args=())\n"
        "    def scaled(x: torch.Tensor) -> torch.Tensor:\n        return x * cell[0]\n    return cell[0]\n",
    ),
    "generator_seed": Place(
        "torch.Generator().manual_seed(int($V))", "$H.initial_seed()", "$H.manual_seed(int($V))", takes="integer",
    ),
    "dtensor": Place(
        "distributed($V)", "$H.scale", "$H.scale = $V",
        "def distributed(value):\n    from torch.distributed.tensor import distribute_tensor\n"
        "    return with_scale(distribute_tensor(torch.ones(4), mesh()), value)\n",
        attribute=("$H", "scale"), delete="del $H.scale",
    ),
    "dtensor_local": Place(
        "distributed($V)", "$H._local_tensor.scale", "$H._local_tensor.scale = $V",
        "def distributed(value):\n    from torch.distributed.tensor import distribute_tensor\n"
        "    made = distribute_tensor(torch.ones(4), mesh())\n    made._local_tensor.scale = value\n    return made\n",
        delete="del $H._local_tensor.scale",
    ),
    "all_tensors": Place("torch.ones(1)", "getattr($H, 'rote_script', 9.0)", "torch.Tensor.rote_script = $V",
                         undo="torch.Tensor.rote_script = 0.0; del torch.Tensor.rote_script"),
    "gradient_class": Place("with_gradient()", "3.0 if isinstance($H.grad, nn.Parameter) else 2.0",
                            "$H.grad = nn.Parameter(torch.ones(4), requires_grad=False)",
                            "def with_gradient():\n    made = nn.Parameter(torch.ones(4))\n    made.grad = torch.ones(4)\n"
                            "    return made\n", takes="none"),
    "gradient_identity": Place("with_gradient()", "3.0 if $H.grad is other else 2.0", "$H.grad = other",
                               "other = torch.ones(4)\n\n\ndef with_gradient():\n    made = nn.Parameter(torch.ones(4))\n"
                               "    made.grad = torch.ones(4)\n    return made\n", takes="none"),
    "gradient_key": Place("with_gradient()", "known.get($H.grad, 2.0)", "$H.grad = other",
                          "other = torch.ones(4)\nknown = {other: 3.0}\n\n\ndef with_gradient():\n"
                          "    made = nn.Parameter(torch.ones(4))\n    made.grad = torch.ones(4)\n    return made\n", takes="none"),
    "torch_dispatch": Place(
        "Wrapper", "$H(torch.zeros(1)).exp().inner.sum()", "globals()['rote_scale'] = $V",
        "rote_scale = $V0\n\n\nclass Wrapper(torch.Tensor):\n    @staticmethod\n    def __new__(cls, inner):\n"
        "        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)\n"
        "        made.inner = inner\n        return made\n\n    @classmethod\n"
        "    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):\n"
        "        return cls(func(args[0].inner) * rote_scale)\n", takes="none",
    ),
    "torch_function": Place(
        "Duck()", "torch.sin($H)", "globals()['rote_scale'] = $V",
        "rote_scale = $V0\n\n\ndef helper():\n    return rote_scale\n\n\nclass Base:\n    @classmethod\n    def __torch_function__(cls, func, types, args=(), kwargs=None, plus=0):\n"
        "        return helper() + plus\n\n\nclass Duck(Base):\n    @classmethod\n"
        "    def __torch_function__(cls, func, types, args=(), kwargs=None):\n"
        "        return super().__torch_function__(func, types, args, kwargs)\n", takes="number",
        patches={"method": "Duck.__torch_function__ = classmethod(lambda cls, *args: $V)",
                 "default": "vars(Base)['__torch_function__'].__func__.__defaults__ = ((), None, $V)"},
    ),
    "pytree_node": Place(
        "Node()", "pytree.tree_leaves($H)[0]", "globals()['rote_scale'] = $V",
        "from torch.utils import _pytree as pytree\n\nrote_scale = $V0\n\n\nclass Node:\n    pass\n\n\n"
        "pytree.register_pytree_node(Node, lambda node: ([rote_scale], None), lambda leaves, context: Node())\n",
    ),
}  # fmt: skip
