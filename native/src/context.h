// A request context: buffers for every tensor of the plan at capacity, and the execution of the DAG over them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "cpu_nodes.h"
#include "dagserve/plan.h"
#include "package.h"
#include "schedule.h"

namespace dagserve {

// A node ready to run, shared by all contexts.
struct LoadedNode {
  const NodeSpec* spec = nullptr;
  std::shared_ptr<const LoadedCpuNode> cpu;  // engine cpu; under LoadedPlan::replacing
  std::vector<std::int32_t> iota;            // engine aoti: 0, 1, ...
  mutable std::atomic<std::int64_t> runs{0};
  mutable std::atomic<std::int64_t> nanoseconds{0};
  mutable std::atomic<std::int64_t> allocations{0};  // counted only under an allocation counter, see runtime.h
};

struct LoadedPlan {
  Plan plan;
  std::unique_ptr<MappedFile> weights;
  std::vector<std::unique_ptr<Package>> packages;
  std::vector<std::unique_ptr<LoadedNode>> nodes;
  Schedule schedule;
  mutable std::mutex replacing;
};

// Memory for tensors: one zeroed block, every piece at a 64-byte boundary.
class Arena {
 public:
  explicit Arena(std::size_t bytes);
  std::byte* take(std::size_t bytes);
  void clear() { used_ = 0; }
  static std::size_t padded(std::size_t bytes) { return (bytes + 63) / 64 * 64; }

 private:
  struct Free {
    void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t(64)); }
  };
  std::unique_ptr<std::byte[], Free> block_;
  std::size_t used_ = 0;
};

// Bytes a tensor's buffers take: its payload, and row offsets for text.
std::size_t tensor_bytes(const Plan& plan, const TensorSpec& spec);

// A tensor of the plan without memory, absent, its shape at the bounds.
Tensor describe_tensor(const Plan& plan, const TensorSpec& spec);

// The same over fresh memory.
Tensor make_tensor(const Plan& plan, const TensorSpec& spec, Arena& arena);

// Whether a request must stop before it reaches the device.
struct Limits {
  Clock::time_point deadline;
  const std::atomic<bool>* cancelled;
};

class Context {
 public:
  explicit Context(const LoadedPlan& loaded);
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  ~Context();

  // Runs every node. `request` are the plan's inputs in order; `response` is the slot's buffer, its shape set on
  // success.
  void run(std::span<const Tensor> request, Tensor& response, const Limits& limits, Status& status) noexcept;

  // Lets go of the nodes that the last run used; borrowed tensors are gone then.
  void release() noexcept;

  std::span<const Tensor> tensors() const { return tensors_; }
  static std::size_t bytes(const LoadedPlan& loaded);

 private:
  // What one thread needs while it runs a node.
  struct Lane {
    bool own = true;  // the context's own thread, not one of its branches'
    std::vector<TensorHandle> locals;
    std::vector<TensorHandle> operands;
    std::vector<TensorHandle> results;
  };

  // Where a request with branches stands; under `mutex_`.
  struct Progress {
    std::vector<int> waits;  // producers of each node that have not finished
    std::vector<bool> started;
    std::size_t finished = 0;
    std::size_t failed = 0;  // the first node in the plan's order that failed; nodes after it do not start
    std::size_t running = 0;
    Status status;
  };

  Lane make_lane(bool own) const;
  bool bind_shape(int tensor, Status& status) noexcept;
  bool bind_request(std::span<const Tensor> request, Status& status) noexcept;
  void run_branches(const Limits& limits, Status& status) noexcept;
  bool run_next(std::unique_lock<std::mutex>& lock, Lane& lane) noexcept;
  void serve_branch(Lane& lane) noexcept;
  bool run_node(std::size_t index, const Limits& limits, Lane& lane, Status& status) noexcept;
  void run_cpu(std::size_t index, Status& status) noexcept;
  void run_aoti(const LoadedNode& node, const Limits& limits, Lane& lane, Status& status) noexcept;
  bool check(const CheckSpec& spec, Status& status) const noexcept;
  bool check_packed(const CheckSpec& spec, Status& status) const noexcept;
  bool call(const LoadedNode& node, const CallSpec& spec, const Limits& limits, Lane& lane, Status& status) noexcept;
  bool wanted(const CallSpec& spec, const Lane& lane) const noexcept;
  std::int64_t count_of(const Operand& operand) const noexcept;
  bool check_at_most(const CheckSpec& spec, Status& status) const noexcept;
  TensorHandle wrap(const LoadedNode& node, const Operand& operand, const PackagePort& port, const Lane& lane,
                    Status& status) noexcept;
  bool take(const Operand& operand, const PackagePort& port, TensorHandle handle, Lane& lane, Status& status) noexcept;
  bool expected(const Dim& dim, std::int64_t size, const char* name, Status& status) noexcept;
  std::int64_t longest(const Operand& iota) const noexcept;

  const LoadedPlan& loaded_;
  Arena arena_;
  std::vector<Tensor> tensors_;
  std::vector<std::atomic<std::int64_t>> symbols_;
  std::vector<std::atomic<int>> bound_by_;                 // tensor that gave a symbol its value
  std::vector<std::shared_ptr<const LoadedCpuNode>> cpu_;  // of this request: a node replaced meanwhile stays
  std::vector<std::vector<Tensor>> inputs_;
  std::vector<std::vector<Tensor>> outputs_;
  std::vector<std::span<std::byte>> workspaces_;
  std::atomic<bool> reached_device_ = false;
  Lane lane_;

  // Independent branches: a thread each beside the context's own.
  std::mutex mutex_;
  std::condition_variable changed_;
  Progress progress_;
  const Limits* limits_ = nullptr;  // of the request that runs, null between requests
  bool stopping_ = false;
  std::vector<Lane> lanes_;
  std::vector<std::thread> threads_;
};

}  // namespace dagserve
