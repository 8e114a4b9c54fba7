// One AOTInductor package: its shared object, its container of runners, constants over the mapped weights, runner pool.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "dagserve/plan.h"
#include "mapped_file.h"
#include "torch_shim.h"

namespace dagserve {

using Clock = std::chrono::steady_clock;

// A counted pool with a bounded wait.
class RunnerPool {
 public:
  explicit RunnerPool(int capacity) : capacity_(capacity) {}

  // False when no runner came free before the deadline.
  bool acquire(Clock::time_point deadline) noexcept;
  void release() noexcept;
  int capacity() const { return capacity_; }
  int used() const noexcept;
  int waiting() const noexcept;

 private:
  mutable std::mutex mutex_;
  std::condition_variable free_;
  int capacity_;
  int used_ = 0;
  int waiting_ = 0;
};

class Package {
 public:
  // Opens the shared object and binds its constants. Throws std::runtime_error listing constants that do not fit.
  Package(const Plan& plan, const PackageSpec& spec, const MappedFile& weights);
  Package(const Package&) = delete;
  Package& operator=(const Package&) = delete;
  ~Package();

  // Runs once. Steals the input handles, whatever the result; outputs belong to the caller on success.
  bool run(TensorHandle* inputs, TensorHandle* outputs, Status& status) const noexcept;

  const PackageSpec& spec() const { return spec_; }
  RunnerPool& pool() const { return pool_; }

 private:
  void open(const std::string& path, int runners);
  void bind_constants(const Plan& plan, const MappedFile& weights);
  std::string last_error() const;

  const PackageSpec& spec_;
  mutable RunnerPool pool_;
  void* library_ = nullptr;
  void* container_ = nullptr;
  std::int32_t (*run_)(void*, TensorHandle*, std::size_t, TensorHandle*, std::size_t, void*, void*) = nullptr;
  std::int32_t (*delete_)(void*) = nullptr;
  std::int32_t (*error_)(const char**) = nullptr;
};

}  // namespace dagserve
