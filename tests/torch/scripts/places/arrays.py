"""NumPy's scalars and arrays."""

from .place import Place, attribute_of, class_, sequence

PLACES: dict[str, Place] = {
    "numpy_scalar": Place("np.float64($V)", "$H", "$H = np.float64($V)", takes="number"),
    "numpy_float32": Place("np.float32($V)", "float($H)", "$H = np.float32($V)", takes="number"),
    "numpy_int": Place("np.int64($V)", "$H", "$H = np.int64($V)", takes="integer"),
    "numpy_array": sequence("np.array([$V, 1.0])", "number",
                            patches={"fill": "$H.fill($V)", "sort": "$H[::-1].sort()", "dtype": "$H.dtype = np.int64"}),
    "numpy_zero_dim": Place("np.array(float($V))", "float($H)", "$H[()] = $V", takes="number"),
    "numpy_matrix": Place("np.full((2, 3), float($V))", "$H.sum(axis=0)[1]", "$H[1, 1] = $V", takes="number",
                          patches={"shape": "$H.shape = (3, 2)"}),
    "numpy_shape": Place("np.ones((2, 3))", "float($H.shape[0])", "$H.shape = (3, 2)", takes="none"),
    "numpy_strided": Place("np.full(6, float($V))[::2]", "float($H[1])", "$H[1] = $V", takes="number"),
    "numpy_structured": Place("structured($V)", "float($H['scale'][0])", "$H['scale'][0] = $V",
                              "def structured(value):\n    made = np.zeros(2, dtype=[('scale', 'f8'), ('n', 'i4')])\n"
                              "    made['scale'] = value\n    return made\n", takes="number"),
    "numpy_record": Place("structured($V)", "float($H['scale'])", "$H['scale'] = $V",
                          "def structured(value):\n    made = np.zeros(2, dtype=[('scale', 'f8'), ('n', 'i4')])\n"
                          "    made['scale'] = value\n    return made[0]\n", takes="number"),
    "numpy_recarray": Place("np.rec.array([($V, 2)], dtype=[('scale', 'f8'), ('n', 'i4')])", "float($H.scale[0])",
                            "$H.scale[0] = $V", takes="number"),
    "numpy_masked": Place("np.ma.array([float($V), 50.0], mask=[False, True])", "float($H.sum())", "$H[0] = $V",
                          takes="number", patches={"mask": "$H.mask[1] = False", "unmask": "$H[1] = 7.0",
                                                   "data": "$H.data[0] = 4.5", "fill": "$H.fill_value = 4.5",
                                                   "harden": "$H.harden_mask()"}),
    "numpy_fill_value": Place("np.ma.array([1.0], mask=[True], fill_value=$V)", "float($H.filled()[0])",
                              "$H.fill_value = $V", takes="number"),
    "numpy_object": sequence("np.array([$V, 'a'], dtype=object)", entries="$H.tolist()[:1]"),
    "numpy_object_inner": Place("np.array([[$V], 'a'], dtype=object)", "$H[0][0]", "$H[0][0] = $V"),
    "numpy_subclass": attribute_of("Table", class_("Table", "np.ndarray"), make="np.ones(2).view(Table)"),
    "numpy_subclass_data": Place("np.array([float($V), 1.0]).view(Table)", "float($H[0])", "$H[0] = $V",
                                 class_("Table", "np.ndarray"), takes="number",
                                 patches={"getitem": "Table.__getitem__ = lambda self, i: 4.5"}),
    "numpy_text": Place("np.array([str($V)], dtype='U8')", "float($H[0])", "$H[0] = str($V)", takes="number"),
    "numpy_from_tensor": Place("torch.full((2,), float($V)).numpy()", "float($H[0])", "$H[0] = $V", takes="number"),
    "numpy_errstate": Place("None", "np.geterr()['divide'] == 'warn'", "np.seterr(divide='ignore')", takes="none",
                            alone=True, undo="np.seterr(divide='warn')"),
    "numpy_printing": Place("None", "float(np.get_printoptions()['precision'])",
                            "np.set_printoptions(precision=int($V) + 4)", takes="integer", alone=True,
                            undo="np.set_printoptions(precision=8)"),
}  # fmt: skip
