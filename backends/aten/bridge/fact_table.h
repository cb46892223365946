// The facts of a variant: reads all of them at every call, as a flat array of 64-bit words, and holds what they saw.
// Rust compares the words; nothing here decides.
#pragma once
#include <algorithm>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "arguments.h"
#include "describe.h"
#include "fact.h"
#include "memory.h"
#include "objects.h"
#include "references.h"
#include "values.h"

namespace rote {

// Facts about Python objects that outlive calls: entries of dicts and lists,
// cells, attributes, sizes, and the tensors of the state.
class FactTable : public Holder {
 public:
  explicit FactTable(Holders holders) : holders_(std::move(holders)) { holders_->insert(this); }

  ~FactTable() override {
    holders_->erase(this);
    for (FactEntry& fact : facts_) {
      Py_XDECREF(fact.container);
      Py_XDECREF(fact.key);
      Py_XDECREF(fact.held);
      Py_XDECREF(fact.spec);
    }
  }

  int traverse(visitproc visit, void* arg) const override {
    for (const FactEntry& fact : facts_) {
      Py_VISIT(fact.container);
      Py_VISIT(fact.key);
      Py_VISIT(fact.held);
      Py_VISIT(fact.spec);
    }
    return 0;
  }

  // Returns how many words the fact adds.
  uint32_t add(uint32_t kind, PyObject* container, PyObject* key) {
    TORCH_CHECK(kind < kFactKinds, kind, " is no kind of fact");
    Py_hash_t hash = 0;
    if (kind == kDictItem || kind == kEntrySize || kind == kEntryCount) {  // once: a user's class may say how its objects hash
      hash = PyObject_Hash(key);
      if (hash == -1) throw py::error_already_set();
    }
    Py_XINCREF(container);
    Py_XINCREF(key);
    facts_.push_back(
        {static_cast<FactKind>(kind), container, key, nullptr, static_cast<uint32_t>(words_), nullptr, 0, 0, hash});
    uint32_t n = width_of(facts_.back());
    sort(static_cast<uint32_t>(facts_.size() - 1));
    if (kind == kGradMeta) gradients_.push_back(static_cast<uint32_t>(facts_.size() - 1));
    if (kind == kGradMemory) grad_memory_ = words_;
    if (kind == kReachMemory) reach_memory_ = words_;
    if (kind == kBuffer) buffers_.push_back(static_cast<uint32_t>(facts_.size() - 1));
    if (kind == kMetadata && is_tensor(container)) metadata_.push_back(static_cast<uint32_t>(facts_.size() - 1));
    words_ += n;
    return n;
  }

  size_t words() const { return words_; }

  // `call` has collected the arguments of the call that is under way. If `kept`, `out` holds what the last read
  // of this table wrote.
  void read(const Call& call, uint64_t* out, bool kept) const {
    for (size_t n = 0; n < always_.size(); ++n) {
      if (n + kAhead < always_.size()) {
        const auto* ahead = reinterpret_cast<const char*>(always_[n + kAhead].container);
        __builtin_prefetch(ahead);
        __builtin_prefetch(ahead + 64);
      }
      const Always& fact = always_[n];
      if (!read_frequent(fact.kind, fact.container, fact.whole, out + fact.start))
        read_words(facts_[fact.index], out + fact.start);
    }
    for (size_t n = 0; n < dicts_.size(); ++n) {
      if (n + kAhead < dicts_.size()) __builtin_prefetch(dicts_[n + kAhead].dict);
      const OfDict& dict = dicts_[n];
      const uint64_t version = dict_version(dict.dict);
      if (kept && version != 0 && version == dict.version) {
        for (uint32_t i : dict.sizes) read_size_of_entry(facts_[i], out + facts_[i].start);
        continue;
      }
      for (uint32_t i : dict.facts) read_words(facts_[i], out + facts_[i].start);
      dict.version = version;
    }
    memory_.begin();
    for (uint32_t i : gradients_) read_gradient(facts_[i], call.has_foreign(), out + facts_[i].start);
    SharedMemory::Words words = read_memory(call);
    if (grad_memory_) out[*grad_memory_] = words.gradients;
    if (reach_memory_) out[*reach_memory_] = words.in_reach;
  }

  // Holds what the facts see now, so that no address can stand for another
  // object later, and so that values can be compared by content.
  void hold() {
    memory_.forget_state();
    std::stable_sort(always_.begin(), always_.end(),  // one kind after the other, which processors predict
                     [](const Always& a, const Always& b) { return a.kind < b.kind; });
    for (FactEntry& fact : facts_) {
      py::object now = object_of(fact);
      Py_XSETREF(fact.held, now.release().ptr());
      if (fact.kind == kTensorMeta) memory_.add_state(fact.start, fact.container);
    }
  }

  // Whether the value behind word `index` equals the one held, by content.
  bool same(uint32_t index) const {
    const FactEntry& fact = at(index);
    switch (fact.kind) {
      case kDictItem: case kListItem: case kTupleItem: case kCell: case kAttribute: case kItems: case kWithin: case kContextVar: case kMember: {
        py::object now = object_of(fact);
        return now && fact.held && same_content(now.ptr(), fact.held);
      }
      default:
        return false;  // the words are all there is
    }
  }

  // The float behind the word at `index`, now.
  double number(uint32_t index) const {
    py::object now = object_of(at(index));
    TORCH_CHECK(now && is_number(now.ptr()), "a hyperparameter is no longer a float");
    return PyFloat_AS_DOUBLE(now.ptr());
  }

  // What the word at `index` sees, as text: now, or when it was held.
  std::string text(uint32_t index, bool held) const {
    const FactEntry& fact = at(index);
    switch (fact.kind) {
      case kNoneOf: {
        const auto there = held ? std::vector<Py_ssize_t>() : present(fact);
        return there.empty() ? "absent" : py::cast<std::string>(PyTuple_GET_ITEM(fact.key, there.front()));
      }
      case kSize:
        return held ? "" : std::to_string(entry_count(fact.container));
      case kDictItem: case kListItem: case kTupleItem: case kCell: case kAttribute: case kContextVar: case kMember: {
        py::object value = held ? py::reinterpret_borrow<py::object>(fact.held) : object_of(fact);
        if (!value) return "absent";
        std::string out = in_words(value.ptr());
        return out.size() > 80 ? out.substr(0, 77) + "..." : out;
      }
      default:
        return "";
    }
  }

 private:
  // How many objects ahead the reader asks for memory: there are too many for the caches.
  static constexpr size_t kAhead = 12;

  // Whether there is a gradient, and its metadata when the plan reads it.
  void read_gradient(const FactEntry& fact, bool foreign, uint64_t* out) const {
    const at::Tensor& outer = THPVariable_Unpack(fact.container);
    const at::Tensor& grad = outer.grad();
    out[0] = grad.defined();
    out[1] = 0;
    if (!grad.defined()) return;
    py::object wrapped = py::reinterpret_steal<py::object>(THPVariable_Wrap(grad));
    const bool distributed = is_dtensor(wrapped.ptr());
    if (fact.key == Py_True) {
      out[1] = mix(grad_word(grad, wrapped.ptr()), address(Py_TYPE(wrapped.ptr())));
      if (distributed) out[1] = mix(out[1], placements_of(fact, wrapped.ptr()));
      if (uint64_t own = own_attributes(wrapped.ptr(), true)) out[1] = mix(out[1], own);
    }
    if (foreign || !is_alone(grad, wrapped.ptr(), distributed)) memory_.add_gradient(fact.start, grad, std::move(wrapped));
  }

  SharedMemory::Words read_memory(const Call& call) const {
    for (uint32_t leaf = 0; leaf < call.leaves.size(); ++leaf)
      if (is_tensor(call.leaves[leaf]))
        memory_.add_gradient_of(1ull << 40 | leaf, THPVariable_Unpack(call.leaves[leaf]), false);
    for (uint32_t i : metadata_) {
      const at::Tensor& tensor = THPVariable_Unpack(facts_[i].container);
      memory_.add_in_reach(facts_[i].start, tensor);
      if (!is_argument(facts_[i])) memory_.add_gradient_of(facts_[i].start, tensor, true);
    }
    SharedMemory::Words words = memory_.read(call);
    for (uint32_t i : buffers_)
      if (auto extent = extent_of_buffer(facts_[i].container)) memory_.read_buffer(facts_[i].start, *extent, call, words);
    return words;
  }

  // A fact that is read at every call. What the frequent kinds need stands here, close together.
  struct Always {
    PyObject* container;
    uint32_t index;  // of the fact
    uint32_t start;
    FactKind kind;
    bool whole;  // the key is True
  };

  // The facts that the entries of one dict decide: they are read again when the dict has changed.
  struct OfDict {
    PyObject* dict;
    mutable uint64_t version;  // when they were read last; 0: they were not
    std::vector<uint32_t> facts;
    std::vector<uint32_t> sizes;  // of these, the facts about what containers in the dict hold
  };

  void sort(uint32_t index) {
    const FactEntry& fact = facts_[index];
    if (fact.kind == kGradMeta || fact.kind == kGradMemory || fact.kind == kReachMemory) return;  // read together
    if (!of_dict(fact)) {
      always_.push_back({fact.container, index, fact.start, fact.kind, fact.key == Py_True});
      return;
    }
    auto [at, is_new] = dict_of_.try_emplace(fact.container, dicts_.size());
    if (is_new) dicts_.push_back({fact.container, 0, {}, {}});
    dicts_[at->second].facts.push_back(index);
    if (fact.kind == kEntrySize) dicts_[at->second].sizes.push_back(index);
    dicts_[at->second].version = 0;
  }

  const FactEntry& at(uint32_t index) const {
    auto it = std::upper_bound(facts_.begin(), facts_.end(), index,
                               [](uint32_t i, const FactEntry& fact) { return i < fact.start; });
    return *(it - 1);
  }

  Holders holders_;
  std::vector<FactEntry> facts_;
  std::vector<Always> always_;
  std::vector<OfDict> dicts_;
  std::unordered_map<PyObject*, size_t> dict_of_;
  size_t words_ = 0;
  std::vector<uint32_t> gradients_;  // facts about gradients,
  std::vector<uint32_t> metadata_;   // about tensors that are no state,
  std::vector<uint32_t> buffers_;    // and about buffers
  std::optional<size_t> grad_memory_, reach_memory_;  // the words about their memory
  mutable SharedMemory memory_;
};

}  // namespace rote
