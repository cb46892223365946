// What of PyTorch stands back while the bridge calls ops.
#pragma once
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace rote {

// What replay runs under: below autograd and autocast. A program enables gradients for the ops that were recorded so.
struct ReplayScope {
  c10::impl::ExcludeDispatchKeyGuard autograd{c10::autograd_dispatch_keyset_with_ADInplaceOrView};
  c10::impl::ExcludeDispatchKeyGuard autocast{c10::autocast_dispatch_keyset};
  c10::AutoGradMode grad{false};
};

// Without modes and subclasses of Python.
struct NoPython {
  c10::impl::ExcludeDispatchKeyGuard python{
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};

}  // namespace rote
