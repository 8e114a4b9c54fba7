// AOTInductor's stable C interface, found at run time in the process's libtorch: nothing here links torch.
#pragma once

#include <cstdint>
#include <string>

#include "dagserve/node.h"

namespace dagserve {

struct AtenTensorOpaque;
using TensorHandle = AtenTensorOpaque*;

// Function pointers of torch/csrc/inductor/aoti_torch/c/shim.h. Every function returns 0 on success.
struct TorchShim {
  std::int32_t (*create_tensor_from_blob)(void*, std::int64_t, const std::int64_t*, const std::int64_t*, std::int64_t,
                                          std::int32_t, std::int32_t, std::int32_t, TensorHandle*);
  std::int32_t (*delete_tensor)(TensorHandle);
  std::int32_t (*get_data_ptr)(TensorHandle, void**);
  std::int32_t (*get_dim)(TensorHandle, std::int64_t*);
  std::int32_t (*get_size)(TensorHandle, std::int64_t, std::int64_t*);
  std::int32_t (*get_stride)(TensorHandle, std::int64_t, std::int64_t*);
  std::int32_t (*get_dtype)(TensorHandle, std::int32_t*);
  void (*set_grad_mode)(bool);
  std::int32_t (*get_num_threads)(std::uint32_t*);
  void (*omp_set_num_threads)(int);       // null where torch has no OpenMP
  int (*mkl_set_num_threads_local)(int);  // null where torch has no MKL
  std::int32_t dtypes[9];                 // torch's code of each Dtype; of text none
  std::int32_t cpu;                       // torch's code of the CPU device type

  // Prepares the calling thread: its operators use no other thread, whatever the process set, and keep no gradients.
  void prepare_thread() const;
};

// Finds libtorch_cpu among the process's loaded libraries. Throws std::runtime_error naming what is missing.
const TorchShim& torch_shim();

// dlsym in an opened library. Throws std::runtime_error naming the symbol and the library.
void* require_symbol(void* library, const char* symbol, const std::string& path);

}  // namespace dagserve
