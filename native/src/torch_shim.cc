#include "torch_shim.h"

#include <dlfcn.h>

#include <stdexcept>

namespace dagserve {

void* require_symbol(void* library, const char* symbol, const std::string& path) {
  if (void* found = dlsym(library, symbol)) return found;
  throw std::runtime_error("[load] " + path + " has no symbol " + symbol + "; use torch >=2.11,<2.14");
}

void TorchShim::prepare_thread() const {
  std::uint32_t threads = 0;
  get_num_threads(&threads);  // torch sets a thread's counts at its first parallel operator: let it do so before we do
  if (omp_set_num_threads != nullptr) omp_set_num_threads(1);
  if (mkl_set_num_threads_local != nullptr) mkl_set_num_threads_local(1);
  set_grad_mode(false);
}

namespace {

constexpr const char* kTorch = "libtorch_cpu.so";

template <class F>
void find(void* library, const char* symbol, F& target) {
  target = reinterpret_cast<F>(require_symbol(library, symbol, kTorch));
}

TorchShim load() {
  void* library = dlopen(kTorch, RTLD_NOLOAD | RTLD_LAZY);
  if (library == nullptr)
    throw std::runtime_error("[load] libtorch_cpu.so is not loaded in this process; load torch first");
  TorchShim shim{};
  find(library, "aoti_torch_create_tensor_from_blob", shim.create_tensor_from_blob);
  find(library, "aoti_torch_delete_tensor_object", shim.delete_tensor);
  find(library, "aoti_torch_get_data_ptr", shim.get_data_ptr);
  find(library, "aoti_torch_get_dim", shim.get_dim);
  find(library, "aoti_torch_get_size", shim.get_size);
  find(library, "aoti_torch_get_stride", shim.get_stride);
  find(library, "aoti_torch_get_dtype", shim.get_dtype);
  find(library, "aoti_torch_grad_mode_set_enabled", shim.set_grad_mode);
  find(library, "torch_get_num_threads", shim.get_num_threads);
  shim.omp_set_num_threads = reinterpret_cast<void (*)(int)>(dlsym(library, "omp_set_num_threads"));
  shim.mkl_set_num_threads_local = reinterpret_cast<int (*)(int)>(dlsym(library, "MKL_Set_Num_Threads_Local"));
  constexpr const char* kDtypes[] = {"uint8",    "bool",    "int32", "int64",        "float16",
                                     "bfloat16", "float32", nullptr, "float8_e4m3fn"};
  for (int i = 0; i < 9; ++i) {
    if (kDtypes[i] == nullptr) continue;
    std::int32_t (*code)() = nullptr;
    find(library, (std::string("aoti_torch_dtype_") + kDtypes[i]).c_str(), code);
    shim.dtypes[i] = code();
  }
  std::int32_t (*cpu)() = nullptr;
  find(library, "aoti_torch_device_type_cpu", cpu);
  shim.cpu = cpu();
  return shim;
}

}  // namespace

const TorchShim& torch_shim() {
  static const TorchShim shim = load();  // the process has one libtorch
  return shim;
}

}  // namespace dagserve
