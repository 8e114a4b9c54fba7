#include "package.h"

#include <dlfcn.h>

#include <algorithm>
#include <stdexcept>

namespace dagserve {

bool RunnerPool::acquire(Clock::time_point deadline) noexcept {
  std::unique_lock lock(mutex_);
  ++waiting_;
  const bool granted = free_.wait_until(lock, deadline, [&] { return used_ < capacity_; });
  --waiting_;
  if (granted) ++used_;
  return granted;
}

void RunnerPool::release() noexcept {
  {
    std::lock_guard lock(mutex_);
    --used_;
  }
  free_.notify_one();
}

int RunnerPool::used() const noexcept {
  std::lock_guard lock(mutex_);
  return used_;
}

int RunnerPool::waiting() const noexcept {
  std::lock_guard lock(mutex_);
  return waiting_;
}

namespace {

std::mutex construction;  // containers cannot be constructed at the same time (pytorch PR 194128)

struct ConstantEntry {
  const char* name;
  TensorHandle handle;
};

struct Handles {
  std::vector<TensorHandle> list;
  ~Handles() {
    for (TensorHandle handle : list) torch_shim().delete_tensor(handle);
  }
};

TensorHandle wrap_weight(const WeightSpec& weight, const MappedFile& weights) {
  const int rank = static_cast<int>(weight.shape.size());
  std::vector<std::int64_t> strides(rank, 1);
  for (int i = rank - 2; i >= 0; --i) strides[i] = strides[i + 1] * weight.shape[i + 1];
  const TorchShim& torch = torch_shim();
  TensorHandle handle = nullptr;
  if (torch.create_tensor_from_blob(weights.data() + weight.offset, rank, weight.shape.data(), strides.data(), 0,
                                    torch.dtypes[static_cast<int>(weight.dtype)], torch.cpu, -1, &handle) != 0)
    throw std::runtime_error("[load] cannot wrap weight " + weight.name);
  return handle;
}

std::string join(const std::vector<std::string>& parts) {
  std::string text;
  for (const std::string& part : parts) text += (text.empty() ? "" : ", ") + part;
  return text;
}

}  // namespace

Package::Package(const Plan& plan, const PackageSpec& spec, const MappedFile& weights)
    : spec_(spec), pool_(plan.runners) {
  std::lock_guard lock(construction);
  try {
    open(plan.root + "/" + spec.path, plan.runners);
    bind_constants(plan, weights);
  } catch (...) {
    if (container_ != nullptr) delete_(container_);
    throw;
  }
}

Package::~Package() {
  if (container_ != nullptr) delete_(container_);
  // The shared object stays loaded: torch may hold pointers into it.
}

void Package::open(const std::string& path, int runners) {
  library_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library_ == nullptr) throw std::runtime_error("[load] cannot open package " + path + ": " + dlerror());
  using Create = std::int32_t (*)(void**, std::size_t, const char*, const char*);
  using Count = std::int32_t (*)(void*, std::size_t*);
  const auto create =
      reinterpret_cast<Create>(require_symbol(library_, "AOTInductorModelContainerCreateWithDevice", path));
  run_ = reinterpret_cast<decltype(run_)>(require_symbol(library_, "AOTInductorModelContainerRun", path));
  delete_ = reinterpret_cast<decltype(delete_)>(require_symbol(library_, "AOTInductorModelContainerDelete", path));
  error_ = reinterpret_cast<decltype(error_)>(dlsym(library_, "AOTInductorGetLastError"));
  if (create(&container_, static_cast<std::size_t>(runners), "cpu", nullptr) != 0)
    throw std::runtime_error("[load] cannot create runners of " + path + ": " + last_error());
  std::size_t inputs = 0;
  std::size_t outputs = 0;
  reinterpret_cast<Count>(require_symbol(library_, "AOTInductorModelContainerGetNumInputs", path))(container_, &inputs);
  reinterpret_cast<Count>(require_symbol(library_, "AOTInductorModelContainerGetNumOutputs", path))(container_,
                                                                                                    &outputs);
  if (inputs != spec_.inputs.size() || outputs != spec_.outputs.size())
    throw std::runtime_error("[load] " + path + " takes " + std::to_string(inputs) + " inputs and gives " +
                             std::to_string(outputs) + " outputs, the plan says otherwise; compile the manifest again");
}

void Package::bind_constants(const Plan& plan, const MappedFile& weights) {
  using Count = std::int32_t (*)(void*, std::size_t*);
  using Name = std::int32_t (*)(void*, std::size_t, const char**);
  using Update = std::int32_t (*)(void*, const ConstantEntry*, std::size_t, bool, bool);
  const auto count =
      reinterpret_cast<Count>(require_symbol(library_, "AOTInductorModelContainerGetNumConstants", spec_.path));
  const auto name =
      reinterpret_cast<Name>(require_symbol(library_, "AOTInductorModelContainerGetConstantName", spec_.path));
  const auto original =
      reinterpret_cast<Name>(require_symbol(library_, "AOTInductorModelContainerGetConstantOriginalFQN", spec_.path));
  const auto update = reinterpret_cast<Update>(
      require_symbol(library_, "AOTInductorModelContainerUpdateUserManagedConstantBufferPairs", spec_.path));
  std::size_t constants = 0;
  if (count(container_, &constants) != 0)
    throw std::runtime_error("[load] " + spec_.path + " does not list its constants");
  std::vector<ConstantEntry> entries;
  std::vector<std::string> missing;
  Handles handles;
  for (std::size_t i = 0; i < constants; ++i) {
    const char* mangled = nullptr;
    const char* fqn = nullptr;
    if (name(container_, i, &mangled) != 0 || original(container_, i, &fqn) != 0)
      throw std::runtime_error("[load] " + spec_.path + " does not name its constants");
    const auto mapped =
        std::ranges::find(spec_.constants, std::string(fqn), &std::pair<std::string, std::string>::first);
    const auto weight = mapped == spec_.constants.end()
                            ? plan.weights.end()
                            : std::ranges::find(plan.weights, mapped->second, &WeightSpec::name);
    if (weight == plan.weights.end()) {
      missing.emplace_back(fqn);
      continue;
    }
    handles.list.push_back(wrap_weight(*weight, weights));
    entries.push_back({mangled, handles.list.back()});
  }
  // A package that runs with a constant unset crashes the process, so every one is checked here.
  if (!missing.empty())
    throw std::runtime_error("[load] " + spec_.path + " needs constants that the plan does not have: " + join(missing) +
                             "; compile the manifest again");
  if (update(container_, entries.data(), entries.size(), false, true) != 0)
    throw std::runtime_error("[load] " + spec_.path + " does not take its constants: " + last_error());
}

std::string Package::last_error() const {
  const char* text = nullptr;
  if (error_ == nullptr || error_(&text) != 0 || text == nullptr) return "no cause given";
  return text;
}

bool Package::run(TensorHandle* inputs, TensorHandle* outputs, Status& status) const noexcept {
  if (run_(container_, inputs, spec_.inputs.size(), outputs, spec_.outputs.size(), nullptr, nullptr) == 0) return true;
  const char* text = nullptr;
  const bool known = error_ != nullptr && error_(&text) == 0 && text != nullptr;
  status.fail(Code::internal, "[%s] package failed: %.400s", spec_.name.c_str(), known ? text : "no cause given");
  return false;
}

}  // namespace dagserve
