// The settings of PyTorch, and what surrounds a call, as words: one for each mode.
#pragma once
#include <type_traits>
#include <vector>

#include <ATen/Context.h>
#include <ATen/DTensorState.h>
#include <ATen/Parallel.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/autocast_mode.h>
#include <c10/core/AutogradState.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/version.h>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include "abi.h"
#include "values.h"

namespace rote {

inline LateClass device_context_class{"torch.utils._device", "DeviceContext"};

// What runs around a call and sees, or changes, each op in it. Such a call is
// not for a plan: it runs eagerly, and is not recorded.
enum Around : uint64_t {
  kDispatchModes = 1,      // of Python
  kFunctionModes = 2,      // other than a default device
  kAnomalyMode = 4,        // it raises where a gradient is NaN
  kForwardMode = 8,        // a level of forward-mode differentiation
  kSavedTensorsHooks = 16,
  kTransforms = 32,        // of torch.func: vmap, grad, functionalize
};

template <typename T>
inline uint64_t setting_word(const T& value) {
  if constexpr (std::is_enum_v<T> || std::is_arithmetic_v<T>) {
    return static_cast<uint64_t>(value);
  } else {  // optional
    return value ? 1 + setting_word(*value) : 0;
  }
}

// Adds a setting that this version of torch has. Getters refuse where old and new names for one setting disagree.
template <typename Getter>
inline void add_setting(uint64_t& hash, Getter get) {
  if constexpr (std::is_invocable_v<Getter, at::Context&>) {
    uint64_t word = ~0ull;
    try {
      word = setting_word(get(at::globalContext()));
    } catch (const c10::Error&) {
    }
    hash = mix(hash, word);
  }
}

#define ROTE_SETTING(hash, getter) \
  add_setting(hash, [](auto& context) -> decltype(context.getter()) { return context.getter(); })

inline uint64_t deterministic_settings() {
  auto& context = at::globalContext();
  return (context.deterministicAlgorithms() ? 1 : 0) | (context.deterministicAlgorithmsWarnOnly() ? 2 : 0);
}

// What composites and DTensor go by, whose choice is recorded: which attention is used, whether plain tensors count as
// replicated, what is checked.
inline uint64_t choice_settings() {
  uint64_t hash = mix(0x4348, at::get_dtensor_allow_implicit_replication());
  ROTE_SETTING(hash, userEnabledFlashSDP);
  ROTE_SETTING(hash, userEnabledFA3SDP);
  ROTE_SETTING(hash, userEnabledFA4SDP);
  ROTE_SETTING(hash, userEnabledMemEfficientSDP);
  ROTE_SETTING(hash, userEnabledMathSDP);
  ROTE_SETTING(hash, userEnabledCuDNNSDP);
  ROTE_SETTING(hash, userEnabledOverrideableSDP);
  ROTE_SETTING(hash, getROCmFAPreferredBackend);
  ROTE_SETTING(hash, releaseWeightsWhenPrepacking);
  ROTE_SETTING(hash, checkSparseTensorInvariants);
  return hash;
}

// Which libraries kernels use, and how exactly they compute.
inline uint64_t kernel_settings() {
  uint64_t hash = 0x4245;
  ROTE_SETTING(hash, deterministicFillUninitializedMemory);
  ROTE_SETTING(hash, deterministicCuDNN);
  ROTE_SETTING(hash, deterministicMkldnn);
  ROTE_SETTING(hash, benchmarkCuDNN);
  ROTE_SETTING(hash, benchmarkLimitCuDNN);
  ROTE_SETTING(hash, userEnabledCuDNN);
  ROTE_SETTING(hash, userEnabledMkldnn);
  ROTE_SETTING(hash, userEnabledNNPACK);
  ROTE_SETTING(hash, immediateMiopen);
  ROTE_SETTING(hash, cudnnDepthwiseKernel);
  ROTE_SETTING(hash, allowFP16BF16ReductionMathSDP);
  ROTE_SETTING(hash, linalgPreferredBackend);
  ROTE_SETTING(hash, blasPreferredBackend);
  ROTE_SETTING(hash, allowTF32OneDNN);
  ROTE_SETTING(hash, allowFP16ReductionCuBLAS);
  ROTE_SETTING(hash, allowBF16ReductionCuBLAS);
  ROTE_SETTING(hash, allowFP16AccumulationCuBLAS);
  ROTE_SETTING(hash, allowFP16ReductionCPU);
  ROTE_SETTING(hash, preferCublasltGroupedGemm);
  ROTE_SETTING(hash, _SMCarveout_EXPERIMENTAL);
  ROTE_SETTING(hash, qEngine);
  ROTE_SETTING(hash, allowNativeAot);
  ROTE_SETTING(hash, maskUnconditionalNativeAot);
  ROTE_SETTING(hash, float32MatmulPrecision);
  ROTE_SETTING(hash, allowTF32CuDNN);
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 11
  auto precision = [&](at::Float32Backend backend, at::Float32Op op) {
    add_setting(hash, [=](at::Context& context) { return context.float32Precision(backend, op); });
  };
  precision(at::Float32Backend::GENERIC, at::Float32Op::ALL);
  for (auto backend : {at::Float32Backend::CUDA, at::Float32Backend::MKLDNN})
    for (auto op : {at::Float32Op::ALL, at::Float32Op::CONV, at::Float32Op::RNN, at::Float32Op::MATMUL})
      precision(backend, op);
#endif
  return hash;
}

// How this thread computes: how many threads it may use, how it rounds, and the device that is current.
inline uint64_t thread_settings() {
  uint64_t hash = static_cast<uint64_t>(at::get_num_threads());
#if defined(__SSE2__)
  hash = mix(hash, _mm_getcsr() & 0xe040);  // rounding, and what becomes of denormal numbers
#endif
  // Not whether there is a device guard: fake tensors put one of a single device where there is no GPU.
  static const bool any = at::hasCUDA();
  if (any) {
    const auto* devices = c10::impl::getDeviceGuardImpl(c10::DeviceType::CUDA);
    hash = mix(hash, static_cast<uint8_t>(devices->getDevice().index()));
  }
  return hash;
}

// All settings by which a kernel computes: a replay runs each op under those that the call found. Those of a thread
// count in the step's own only.
inline uint64_t computing_settings(bool own_thread) {
  uint64_t hash = mix(kernel_settings(), deterministic_settings());
  hash = mix(hash, static_cast<uint64_t>(c10::get_default_dtype_as_scalartype()));
  return own_thread ? mix(hash, thread_settings()) : hash;
}

inline uint64_t autograd_settings() {
  const auto& state = c10::AutogradState::get_tls_state();
  return (state.get_fw_grad_mode() ? 1 : 0) | (state.get_multithreading_enabled() ? 2 : 0) |
         (state.get_view_replay_enabled() ? 4 : 0) | (at::SavedTensorDefaultHooks::is_enabled() ? 8 : 0);
}

inline uint64_t autocast_settings() {
  return (at::autocast::is_autocast_enabled(at::kCPU) ? 1 : 0) | (at::autocast::is_autocast_enabled(at::kCUDA) ? 2 : 0) |
         (at::autocast::is_autocast_cache_enabled() ? 4 : 0) |
         static_cast<uint64_t>(at::autocast::get_autocast_dtype(at::kCPU)) << 8 |
         static_cast<uint64_t>(at::autocast::get_autocast_dtype(at::kCUDA)) << 16;
}

// The default device, of a mode on the functions of torch; `around` learns of other modes.
inline uint64_t default_device(uint64_t& around, std::vector<py::object>* kept) {
  uint64_t hash = static_cast<uint64_t>(at::impl::PythonTorchFunctionTLS::get_disabled_state());
  int64_t n = at::impl::PythonTorchFunctionTLS::stack_len();
  for (int64_t i = 0; i < n; ++i) {
    PyObject* mode = at::impl::PythonTorchFunctionTLS::get_stack_at(i)->ptr(getPyInterpreter());
    if (Py_TYPE(mode) != device_context_class.get()) {
      around |= kFunctionModes;
      continue;
    }
    py::object device = py::reinterpret_steal<py::object>(PyObject_GetAttrString(mode, "device"));
    if (!device) throw py::error_already_set();
    hash = mix(hash, Content(Content::kAll, kept).word(device.ptr()));
  }
  return hash;
}

// Calls `add(word)` for each mode. `world` tells the default process groups of a process apart.
template <typename Add>
inline void read_modes(uint64_t world, std::vector<py::object>* kept, Add&& add) {
  uint64_t around = 0;
  uint64_t device = default_device(around, kept);
  auto keys = c10::impl::tls_local_dispatch_key_set();
  // A recording under way counts as a mode: it sees what the ops of this call do.
  if (c10::impl::TorchDispatchModeTLS::stack_len() > 0 || keys.included_.has(c10::DispatchKey::Fake))
    around |= kDispatchModes;
  if (torch::autograd::AnomalyMode::is_enabled()) around |= kAnomalyMode;
  if (torch::autograd::ForwardADLevel::try_get_by_idx(0)) around |= kForwardMode;
  if (!at::SavedTensorDefaultHooks::get_tls_state().stack.empty()) around |= kSavedTensorsHooks;
  if (keys.included_.has(c10::DispatchKey::FuncTorchDynamicLayerFrontMode)) around |= kTransforms;
  uint64_t words[kModes] = {};
  words[kModeAround] = around;
  words[kModeGradMode] = c10::GradMode::is_enabled();
  words[kModeInferenceMode] = c10::InferenceMode::is_enabled();
  words[kModeAutocast] = autocast_settings();
  words[kModeDeterministic] = deterministic_settings();
  words[kModeDefaultDtype] = static_cast<uint64_t>(c10::get_default_dtype_as_scalartype());
  words[kModeBackends] = mix(choice_settings(), kernel_settings());
  words[kModeDefaultDevice] = device;
  words[kModeAutograd] = autograd_settings();
  words[kModeDispatchKeys] = mix(keys.included_.raw_repr(), keys.excluded_.raw_repr());
  words[kModeThreads] = thread_settings();
  words[kModeProcessGroup] = world;
  for (uint64_t word : words) add(word);
}

}  // namespace rote
