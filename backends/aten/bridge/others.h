// Sees what other threads of Python do to the tensors of a step while it is recorded:
// a recording holds only what its own thread does, and those that work for it.
#pragma once
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <torch/csrc/python_headers.h>

#include "works.h"

namespace rote {

// The storages of the step that is being recorded, and who else used them. Other
// threads ask without the GIL.
class Others {
 public:
  // A recording begins: what is known of the last one is forgotten.
  void forget() {
    std::lock_guard<std::mutex> lock(mutex_);
    step_.clear();
    found_.clear();
  }

  // Its step begins, in this thread.
  void begin() {
    std::lock_guard<std::mutex> lock(mutex_);
    own_ = std::this_thread::get_id();
    watching_ = true;
  }

  void end() {
    std::lock_guard<std::mutex> lock(mutex_);
    watching_ = false;
    written_.clear();
  }

  // The step uses a storage; `made`: it made it.
  void uses(c10::StorageImpl* storage, bool made) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!step_.emplace(storage, made).second || made) return;
    auto it = written_.find(storage);
    if (it != written_.end() && found_.empty()) found_ = it->second.second;
  }

  // An op is called. Threads of PyTorch's own pools, which work for an op of the step, have no state of Python.
  void called(const at::RecordFunction& call) {
    auto name = call.operator_name();
    if (!name || !PyGILState_GetThisThreadState()) return;
    auto handle = c10::Dispatcher::singleton().findSchema(*name);
    if (!handle) return;
    const auto& formals = handle->schema().arguments();
    auto inputs = call.inputs();
    std::lock_guard<std::mutex> lock(mutex_);
    if (!watching_ || std::this_thread::get_id() == own_) return;
    for (size_t i = 0; i < inputs.size() && i < formals.size(); ++i) {
      bool writes = (formals[i].alias_info() && formals[i].alias_info()->isWrite()) || Works::writes(handle->schema(), formals[i]);
      if (inputs[i].isTensor()) {
        looked_at(inputs[i].toTensor(), writes, *name);
      } else if (inputs[i].isList()) {
        for (const c10::IValue& item : inputs[i].toListRef()) {
          if (!item.isTensor()) break;
          looked_at(item.toTensor(), writes, *name);
        }
      }
    }
  }

  // The first op of another thread that wrote what the step uses, or read what it made; empty if there was none.
  std::string found() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return found_;
  }

 private:
  using Weak = c10::weak_intrusive_ptr<c10::StorageImpl>;

  void looked_at(const at::Tensor& tensor, bool writes, const c10::OperatorName& op) {
    if (!tensor.defined() || !tensor.has_storage()) return;
    c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
    auto it = step_.find(storage);
    if (it != step_.end()) {
      if ((writes || it->second) && found_.empty()) found_ = c10::toString(op);
    } else if (writes && written_.find(storage) == written_.end()) {
      // Held weakly, so that no other storage has its address while the recording lasts.
      auto strong = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage);
      written_.emplace(storage, std::pair(Weak(strong), c10::toString(op)));
    }
  }

  mutable std::mutex mutex_;
  bool watching_ = false;
  std::thread::id own_;
  std::unordered_map<c10::StorageImpl*, bool> step_;  // whether the step made it
  std::unordered_map<c10::StorageImpl*, std::pair<Weak, std::string>> written_;
  std::string found_;
};

inline Others& others() {
  static auto* all = new Others();
  return *all;
}

inline std::unique_ptr<at::ObserverContext> called_elsewhere(const at::RecordFunction& call) {
  others().called(call);
  return nullptr;
}

}  // namespace rote
