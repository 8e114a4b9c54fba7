#include "context.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <new>

#include "allocations.h"

namespace dagserve {

Arena::Arena(std::size_t bytes) : block_(new (std::align_val_t(64)) std::byte[padded(bytes) + 64]()) {}

std::byte* Arena::take(std::size_t bytes) {
  std::byte* start = block_.get() + used_;
  used_ += padded(bytes);
  return start;
}

namespace {

std::int64_t size_at_bound(const Plan& plan, const Dim& dim) {
  return (dim.symbol < 0 ? 0 : plan.symbols[dim.symbol].bound) + dim.add;
}

std::size_t payload_bytes(const TensorSpec& spec) { return Arena::padded(static_cast<std::size_t>(spec.capacity)); }

std::size_t offsets_bytes(const Plan& plan, const TensorSpec& spec) {
  if (spec.dtype != Dtype::text) return 0;
  const std::int64_t rows = spec.shape.empty() ? 1 : size_at_bound(plan, spec.shape[0]);
  return Arena::padded(static_cast<std::size_t>(rows + 1) * sizeof(std::int64_t));
}

}  // namespace

std::size_t tensor_bytes(const Plan& plan, const TensorSpec& spec) {
  return payload_bytes(spec) + offsets_bytes(plan, spec);
}

Tensor describe_tensor(const Plan& plan, const TensorSpec& spec) {
  Tensor tensor;
  tensor.dtype = spec.dtype;
  tensor.rank = static_cast<int>(spec.shape.size());
  tensor.capacity = spec.capacity;
  tensor.present = false;
  for (int i = 0; i < tensor.rank; ++i) tensor.bound[i] = tensor.shape[i] = size_at_bound(plan, spec.shape[i]);
  return tensor;
}

Tensor make_tensor(const Plan& plan, const TensorSpec& spec, Arena& arena) {
  Tensor tensor = describe_tensor(plan, spec);
  tensor.data = arena.take(payload_bytes(spec));
  if (spec.dtype == Dtype::text)
    tensor.offsets = reinterpret_cast<std::int64_t*>(arena.take(offsets_bytes(plan, spec)));
  return tensor;
}

namespace {

// Request inputs and the response live in the request's slot.
std::vector<bool> in_slot(const Plan& plan) {
  std::vector<bool> result(plan.tensors.size());
  for (const InputSpec& input : plan.inputs) result[input.tensor] = true;
  result[plan.response] = true;
  return result;
}

}  // namespace

std::size_t Context::bytes(const LoadedPlan& loaded) {
  const std::vector<bool> elsewhere = in_slot(loaded.plan);
  std::size_t total = 0;
  for (std::size_t i = 0; i < elsewhere.size(); ++i)
    if (!elsewhere[i]) total += tensor_bytes(loaded.plan, loaded.plan.tensors[i]);
  for (const auto& node : loaded.nodes)
    if (node->cpu) total += Arena::padded(node->cpu->workspace_bytes());
  return total;
}

Context::Context(const LoadedPlan& loaded)
    : loaded_(loaded),
      arena_(bytes(loaded)),
      symbols_(loaded.plan.symbols.size()),
      bound_by_(loaded.plan.symbols.size()),
      lane_(make_lane(true)) {
  const Plan& plan = loaded.plan;
  const std::vector<bool> elsewhere = in_slot(plan);
  for (std::size_t i = 0; i < plan.tensors.size(); ++i)
    tensors_.push_back(elsewhere[i] ? describe_tensor(plan, plan.tensors[i])
                                    : make_tensor(plan, plan.tensors[i], arena_));
  for (const auto& node : loaded.nodes) {
    inputs_.emplace_back(node->spec->inputs.size());
    outputs_.emplace_back(node->spec->outputs.size());
    const std::size_t workspace = node->cpu ? node->cpu->workspace_bytes() : 0;
    workspaces_.emplace_back(arena_.take(workspace), workspace);
  }
  cpu_.resize(loaded.nodes.size());
  progress_.waits = loaded.schedule.waits;
  progress_.started.resize(loaded.nodes.size());
  for (int i = 1; i < loaded.schedule.branches; ++i) lanes_.push_back(make_lane(false));
  for (Lane& lane : lanes_) threads_.emplace_back([this, &lane] { serve_branch(lane); });
}

Context::~Context() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

Context::Lane Context::make_lane(bool own) const {
  std::size_t locals = 0;
  std::size_t operands = 0;
  for (const auto& node : loaded_.nodes) {
    locals = std::max(locals, static_cast<std::size_t>(node->spec->locals));
    for (const CallSpec& call : node->spec->calls)
      operands = std::max({operands, call.inputs.size(), call.outputs.size()});
  }
  Lane lane;
  lane.own = own;
  lane.locals.resize(locals);
  lane.operands.resize(operands);
  lane.results.resize(operands);
  return lane;
}

void Context::run(std::span<const Tensor> request, Tensor& response, const Limits& limits, Status& status) noexcept {
  for (auto& symbol : symbols_) symbol.store(-1, std::memory_order_relaxed);
  reached_device_ = false;
  {
    std::lock_guard lock(loaded_.replacing);
    for (std::size_t i = 0; i < cpu_.size(); ++i) cpu_[i] = loaded_.nodes[i]->cpu;
  }
  for (Tensor& tensor : tensors_) tensor.present = false;
  tensors_[loaded_.plan.response] = response;
  bool good = bind_request(request, status);
  if (good && !lanes_.empty()) {
    run_branches(limits, status);
    good = status.ok();
  } else {
    for (std::size_t i = 0; good && i < loaded_.nodes.size(); ++i) good = run_node(i, limits, lane_, status);
  }
  if (good) {
    response.shape[0] = tensors_[loaded_.plan.response].shape[0];
    response.present = true;
  }
}

void Context::release() noexcept {
  for (auto& node : cpu_) node.reset();
}

// Runs every node as soon as what it waits for is there, on this thread and those of the branches. What fails is told
// of the first node that failed, so nodes before it go on.
void Context::run_branches(const Limits& limits, Status& status) noexcept {
  std::unique_lock lock(mutex_);
  std::ranges::copy(loaded_.schedule.waits, progress_.waits.begin());
  std::fill(progress_.started.begin(), progress_.started.end(), false);
  progress_.finished = progress_.running = 0;
  progress_.failed = loaded_.nodes.size();
  limits_ = &limits;
  while (true) {
    if (run_next(lock, lane_)) continue;
    if (progress_.running == 0) break;  // all is done, or what is left comes after a failure
    changed_.wait(lock);
  }
  limits_ = nullptr;
  if (progress_.failed < loaded_.nodes.size()) status = progress_.status;
}

// Runs the first node that can start, without the lock; false where there is none.
bool Context::run_next(std::unique_lock<std::mutex>& lock, Lane& lane) noexcept {
  std::size_t index = 0;
  while (index < progress_.failed && (progress_.started[index] || progress_.waits[index] > 0)) ++index;
  if (limits_ == nullptr || index >= progress_.failed) return false;
  progress_.started[index] = true;
  ++progress_.running;
  const Limits& limits = *limits_;
  lock.unlock();
  Status status;
  run_node(index, limits, lane, status);
  lock.lock();
  --progress_.running;
  if (status.ok()) {
    for (const int consumer : loaded_.schedule.consumers[index]) --progress_.waits[consumer];
  } else if (index < progress_.failed) {
    progress_.failed = index;
    progress_.status = status;
  }
  changed_.notify_all();
  return true;
}

void Context::serve_branch(Lane& lane) noexcept {
  torch_shim().prepare_thread();
  std::unique_lock lock(mutex_);
  while (!stopping_)
    if (!run_next(lock, lane)) changed_.wait(lock);
}

bool Context::bind_request(std::span<const Tensor> request, Status& status) noexcept {
  for (std::size_t i = 0; i < request.size(); ++i) {
    const int index = loaded_.plan.inputs[i].tensor;
    tensors_[index] = request[i];
    if (request[i].present && !bind_shape(index, status)) return false;
  }
  return true;
}

// Checks a tensor's logical shape against the bounds and against what other tensors said of the same symbols. Branches
// that run at once decide no symbol in common, see schedule.h.
bool Context::bind_shape(int index, Status& status) noexcept {
  const Plan& plan = loaded_.plan;
  const TensorSpec& spec = plan.tensors[index];
  for (int i = 0; i < tensors_[index].rank; ++i) {
    const Dim& dim = spec.shape[i];
    const std::int64_t value = tensors_[index].shape[i] - dim.add;
    if (dim.symbol < 0) {
      if (value != 0) {
        status.fail(Code::invalid_request, "%s has %lld rows in dimension %d; it must have %lld", spec.name.c_str(),
                    static_cast<long long>(value + dim.add), i, static_cast<long long>(dim.add));
        return false;
      }
      continue;
    }
    const Symbol& symbol = plan.symbols[dim.symbol];
    if (value < 1 || value > symbol.bound) {
      status.fail(Code::invalid_request, "%s has %s = %lld; it must be between 1 and %lld", spec.name.c_str(),
                  symbol.name.c_str(), static_cast<long long>(value), static_cast<long long>(symbol.bound));
      return false;
    }
    const std::int64_t known = symbols_[dim.symbol].load(std::memory_order_relaxed);
    if (known >= 0 && known != value) {
      status.fail(Code::invalid_request, "%s has %s = %lld, but %s has %lld; they must agree", spec.name.c_str(),
                  symbol.name.c_str(), static_cast<long long>(value), plan.tensors[bound_by_[dim.symbol]].name.c_str(),
                  static_cast<long long>(known));
      return false;
    }
    if (known < 0) bound_by_[dim.symbol] = index;
    symbols_[dim.symbol].store(value, std::memory_order_relaxed);
  }
  return true;
}

bool Context::run_node(std::size_t index, const Limits& limits, Lane& lane, Status& status) noexcept {
  const LoadedNode& node = *loaded_.nodes[index];
  if (!reached_device_ && limits.cancelled->load(std::memory_order_relaxed)) {
    status.fail(Code::cancelled, "the caller left before the request started");
  } else if (!reached_device_ && Clock::now() >= limits.deadline) {
    status.fail(Code::deadline_exceeded, "the deadline passed before the request reached the model");
  } else {
    const std::int64_t allocated = thread_allocations();
    const Clock::time_point started = Clock::now();
    if (cpu_[index]) {
      run_cpu(index, status);
    } else {
      run_aoti(node, limits, lane, status);
    }
    node.runs.fetch_add(1, std::memory_order_relaxed);
    node.nanoseconds.fetch_add((Clock::now() - started).count(), std::memory_order_relaxed);
    if (lane.own) node.allocations.fetch_add(thread_allocations() - allocated, std::memory_order_relaxed);
  }
  if (status.ok())
    for (int output : node.spec->outputs)
      if (!bind_shape(output, status)) break;
  if (!status.ok()) std::snprintf(status.node, sizeof(status.node), "%s", node.spec->name.c_str());
  return status.ok();
}

void Context::run_cpu(std::size_t index, Status& status) noexcept {
  const NodeSpec& spec = *loaded_.nodes[index]->spec;
  for (std::size_t i = 0; i < spec.inputs.size(); ++i)
    inputs_[index][i] = spec.inputs[i] < 0 ? Tensor{.present = false} : tensors_[spec.inputs[i]];
  for (std::size_t i = 0; i < spec.outputs.size(); ++i) {
    outputs_[index][i] = tensors_[spec.outputs[i]];
    outputs_[index][i].present = true;
  }
  cpu_[index]->run(inputs_[index], outputs_[index], workspaces_[index], status);
  if (!status.ok()) return;
  for (std::size_t i = 0; i < spec.outputs.size(); ++i) tensors_[spec.outputs[i]] = outputs_[index][i];
}

void Context::run_aoti(const LoadedNode& node, const Limits& limits, Lane& lane, Status& status) noexcept {
  for (const CheckSpec& spec : node.spec->checks)
    if (!check(spec, status)) return;
  for (const CallSpec& spec : node.spec->calls) {
    if (wanted(spec, lane) && !call(node, spec, limits, lane, status)) break;
  }
  for (TensorHandle& local : lane.locals) {
    if (local != nullptr) torch_shim().delete_tensor(local);
    local = nullptr;
  }
}

bool Context::wanted(const CallSpec& spec, const Lane& lane) const noexcept {
  if (spec.when_local >= 0) {
    void* data = nullptr;
    const TensorHandle local = lane.locals[spec.when_local];
    const bool there = local != nullptr && torch_shim().get_data_ptr(local, &data) == 0;
    return (there ? static_cast<const std::uint8_t*>(data)[0] : spec.when_default) == spec.equals;
  }
  if (spec.when < 0) return true;
  const Tensor& chooser = tensors_[spec.when];
  return (chooser.present ? chooser.as<std::uint8_t>()[0] : spec.when_default) == spec.equals;
}

// The number of rows a `count` operand has.
std::int64_t Context::count_of(const Operand& operand) const noexcept {
  const auto value = [&](int tensor, std::int64_t otherwise) {
    return tensor >= 0 && tensors_[tensor].present ? tensors_[tensor].as<std::int64_t>()[0] : otherwise;
  };
  return value(operand.index, std::min(operand.bound, value(operand.at_most, operand.at_most_default)));
}

bool Context::check_at_most(const CheckSpec& spec, Status& status) const noexcept {
  const Tensor& tensor = tensors_[spec.tensor];
  const Tensor& other = tensors_[spec.other];
  if (!tensor.present || !other.present) return true;
  const std::int64_t value = tensor.as<std::int64_t>()[0];
  const std::int64_t limit = other.as<std::int64_t>()[0];
  if (value <= limit) return true;
  const char* const name = loaded_.plan.tensors[spec.tensor].name.c_str();
  const char* const by = loaded_.plan.tensors[spec.other].name.c_str();
  status.fail(Code::invalid_request, "%s is %lld but %s is %lld; lower %s or raise %s", name,
              static_cast<long long>(value), by, static_cast<long long>(limit), name, by);
  return false;
}

bool Context::check(const CheckSpec& spec, Status& status) const noexcept {
  if (spec.kind == CheckSpec::Kind::packed) return check_packed(spec, status);
  if (spec.kind == CheckSpec::Kind::at_most) return check_at_most(spec, status);
  const Tensor& tensor = tensors_[spec.tensor];
  const std::int64_t count = tensor.present ? tensor.numel() : 0;
  if (tensor.dtype == Dtype::f32) {
    const float* const values = tensor.as<float>();
    const auto low = static_cast<float>(spec.low), high = static_cast<float>(spec.high - 1);
    if (std::all_of(values, values + count, [&](float value) { return value >= low && value <= high; })) return true;
    status.fail(Code::invalid_request, "%s must be from %lld to %lld", loaded_.plan.tensors[spec.tensor].name.c_str(),
                static_cast<long long>(spec.low), static_cast<long long>(spec.high - 1));
    return false;
  }
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t value = tensor.dtype == Dtype::i32 ? tensor.as<std::int32_t>()[i] : tensor.as<std::int64_t>()[i];
    if (value < spec.low || value >= spec.high) {
      char place[32] = "";
      if (tensor.rank) std::snprintf(place, sizeof(place), "[%lld]", static_cast<long long>(i));
      status.fail(Code::invalid_request, "%s%s is %lld; it must be from %lld to %lld",
                  loaded_.plan.tensors[spec.tensor].name.c_str(), place, static_cast<long long>(value),
                  static_cast<long long>(spec.low), static_cast<long long>(spec.high - 1));
      return false;
    }
  }
  return true;
}

bool Context::check_packed(const CheckSpec& spec, Status& status) const noexcept {
  const char* name = loaded_.plan.tensors[spec.cu_seqlens].name.c_str();
  const Tensor& tensor = tensors_[spec.cu_seqlens];
  const std::int32_t* cu_seqlens = tensor.as<std::int32_t>();
  const std::int64_t rows = tensor.shape[0] - 1;
  const std::int64_t tokens = tensors_[spec.tensor].shape[0];
  std::int64_t prefix = 0;
  if (cu_seqlens[0] != 0 || cu_seqlens[rows] != tokens) {
    status.fail(Code::invalid_request, "%s must start at 0 and end at the number of tokens, %lld", name,
                static_cast<long long>(tokens));
    return false;
  }
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t length = std::int64_t{cu_seqlens[row + 1]} - cu_seqlens[row];
    if (spec.shared && row == 0) {
      prefix = length;
      if (length >= 0 && length < spec.max_length) continue;
    }
    if (length < 1 || prefix + length > spec.max_length) {
      status.fail(Code::invalid_request, "%s: row %lld has %lld tokens; it must have from 1 to %lld", name,
                  static_cast<long long>(row), static_cast<long long>(row ? prefix + length : length),
                  static_cast<long long>(spec.max_length));
      return false;
    }
  }
  return true;
}

std::int64_t Context::longest(const Operand& iota) const noexcept {
  const std::int32_t* values = tensors_[iota.index].as<std::int32_t>();
  const std::int64_t rows = tensors_[iota.index].shape[0] - 1;
  const std::int64_t end = iota.rows == Operand::Rows::first ? 1 : rows;
  std::int64_t most = iota.rows == Operand::Rows::first ? 1 : 0;
  for (std::int64_t i = iota.rows == Operand::Rows::rest ? 1 : 0; i < end; ++i)
    most = std::max<std::int64_t>(most, values[i + 1] - values[i]);
  return most;
}

// Runs one package: takes a runner, wraps operands without copying, copies results into this context's buffers.
bool Context::call(const LoadedNode& node, const CallSpec& spec, const Limits& limits, Lane& lane,
                   Status& status) noexcept {
  const Package& package = *loaded_.packages[spec.package];
  const Clock::time_point patience = reached_device_ ? Clock::time_point::max() : limits.deadline;
  if (!package.pool().acquire(patience)) {
    status.fail(Code::deadline_exceeded, "no runner came free before the deadline");
    return false;
  }
  reached_device_ = true;
  std::size_t wrapped = 0;
  for (; wrapped < spec.inputs.size(); ++wrapped) {
    lane.operands[wrapped] = wrap(node, spec.inputs[wrapped], package.spec().inputs[wrapped], lane, status);
    if (lane.operands[wrapped] == nullptr) break;
  }
  bool good = wrapped == spec.inputs.size();
  if (!good) {
    for (std::size_t i = 0; i < wrapped; ++i) torch_shim().delete_tensor(lane.operands[i]);
  } else {
    good = package.run(lane.operands.data(), lane.results.data(), status);
  }
  package.pool().release();
  if (!good) return false;
  for (std::size_t i = 0; i < spec.outputs.size(); ++i)
    good = take(spec.outputs[i], package.spec().outputs[i], lane.results[i], lane, status) && good;
  return good;
}

TensorHandle Context::wrap(const LoadedNode& node, const Operand& operand, const PackagePort& port, const Lane& lane,
                           Status& status) noexcept {
  const TorchShim& torch = torch_shim();
  std::int64_t sizes[kMaxRank] = {};
  std::int64_t strides[kMaxRank] = {};
  const int rank = static_cast<int>(port.shape.size());
  void* data = nullptr;
  switch (operand.kind) {
    case Operand::Kind::tensor: {
      const Tensor& tensor = tensors_[operand.index];
      if (!tensor.present || tensor.rank != rank || tensor.dtype != port.dtype) {
        status.fail(Code::internal, "%s does not fit the package's input %s",
                    loaded_.plan.tensors[operand.index].name.c_str(), port.name.c_str());
        return nullptr;
      }
      std::copy_n(tensor.shape, rank, sizes);
      data = tensor.data;
      break;
    }
    case Operand::Kind::iota:
      sizes[0] = longest(operand);
      data = const_cast<std::int32_t*>(node.iota.data());
      break;
    case Operand::Kind::count:
      sizes[0] = count_of(operand);
      if (sizes[0] < 1 || sizes[0] > std::ssize(node.iota)) {
        status.fail(Code::internal, "the size of the package's input %s is out of its bounds", port.name.c_str());
        return nullptr;
      }
      data = const_cast<std::int32_t*>(node.iota.data());
      break;
    case Operand::Kind::row: {
      const Tensor& tensor = tensors_[operand.index];
      const std::int32_t* const ends = tensors_[operand.ends].as<std::int32_t>() + operand.row;
      if (ends[0] < 0 || ends[1] <= ends[0] || ends[1] > tensor.shape[0]) {
        status.fail(Code::internal, "the package's input %s has no such row", port.name.c_str());
        return nullptr;
      }
      sizes[0] = ends[1] - ends[0];
      data = tensor.as<std::byte>() + ends[0] * static_cast<std::int64_t>(dtype_bytes(tensor.dtype));
      break;
    }
    case Operand::Kind::scalar: {
      const bool given = operand.index >= 0 && tensors_[operand.index].present;
      data = given ? tensors_[operand.index].data : const_cast<float*>(&operand.scalar);
      break;
    }
    case Operand::Kind::local: {
      const TensorHandle local = lane.locals[operand.index];
      for (int i = 0; i < rank; ++i) torch.get_size(local, i, &sizes[i]);
      torch.get_data_ptr(local, &data);
      break;
    }
  }
  for (int i = rank - 1; i >= 0; --i) strides[i] = i == rank - 1 ? 1 : strides[i + 1] * sizes[i + 1];
  TensorHandle handle = nullptr;
  if (torch.create_tensor_from_blob(data, rank, sizes, strides, 0, torch.dtypes[static_cast<int>(port.dtype)],
                                    torch.cpu, -1, &handle) != 0)
    status.fail(Code::internal, "cannot wrap the package's input %s", port.name.c_str());
  return handle;
}

bool Context::expected(const Dim& dim, std::int64_t size, const char* name, Status& status) noexcept {
  const std::int64_t value = dim.symbol < 0 ? 0 : symbols_[dim.symbol].load(std::memory_order_relaxed);
  if (value < 0 || value + dim.add == size) return true;
  status.fail(Code::internal, "the package gave %s with size %lld where %lld was planned", name,
              static_cast<long long>(size), static_cast<long long>(value + dim.add));
  return false;
}

// Checks what a package returned, then keeps it as a local or copies it into a buffer. Owns the handle.
bool Context::take(const Operand& operand, const PackagePort& port, TensorHandle handle, Lane& lane,
                   Status& status) noexcept {
  const TorchShim& torch = torch_shim();
  const int rank = static_cast<int>(port.shape.size());
  std::int64_t dims = 0;
  std::int32_t dtype = 0;
  std::int64_t contiguous = 1;
  std::int64_t sizes[kMaxRank] = {};
  void* data = nullptr;
  bool good = torch.get_dim(handle, &dims) == 0 && torch.get_dtype(handle, &dtype) == 0 &&
              torch.get_data_ptr(handle, &data) == 0 && dims == rank &&
              dtype == torch.dtypes[static_cast<int>(port.dtype)];
  for (int i = rank - 1; good && i >= 0; --i) {
    std::int64_t stride = 0;
    good = torch.get_size(handle, i, &sizes[i]) == 0 && torch.get_stride(handle, i, &stride) == 0 &&
           (stride == contiguous || sizes[i] == 1);
    contiguous *= sizes[i];
  }
  if (!good) status.fail(Code::internal, "the package gave %s of another dtype, rank or layout", port.name.c_str());
  for (int i = 0; good && i < rank; ++i) good = expected(port.shape[i], sizes[i], port.name.c_str(), status);
  const std::int64_t bytes = contiguous * static_cast<std::int64_t>(dtype_bytes(port.dtype));
  if (good && operand.kind == Operand::Kind::tensor) {
    Tensor& tensor = tensors_[operand.index];
    good = bytes <= tensor.capacity && tensor.rank == rank && tensor.dtype == port.dtype;
    if (good) {
      std::memcpy(tensor.data, data, static_cast<std::size_t>(bytes));
      std::copy_n(sizes, rank, tensor.shape);
      tensor.present = true;
    } else {
      status.fail(Code::internal, "the package's output %s does not fit its buffer", port.name.c_str());
    }
  }
  if (good && operand.kind == Operand::Kind::local) {
    TensorHandle& local = lane.locals[operand.index];
    if (local != nullptr) torch.delete_tensor(local);
    local = handle;
    return true;
  }
  torch.delete_tensor(handle);
  return good;
}

}  // namespace dagserve
