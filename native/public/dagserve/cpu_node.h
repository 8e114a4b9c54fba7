/* The interface of CPU nodes: what dagserve's own nodes implement, and a shared library of yours may.
 *
 * A library exports one function, `dagserve_nodes`, which returns its nodes. A node is created when an artifact is
 * loaded and run once for each request, by several threads at once, each with its own tensors and workspace. While it
 * runs it may read its inputs, write its outputs and use its workspace; it may not throw, allocate where that can be
 * helped, or keep a pointer into a tensor.
 *
 * Plain C, so that any compiler can build one. DAGSERVE_NODE_ABI changes whenever a struct or a rule below does; a
 * library of another version is refused when it is loaded.
 */
#ifndef DAGSERVE_CPU_NODE_H
#define DAGSERVE_CPU_NODE_H

#include <stddef.h>
#include <stdint.h>

#define DAGSERVE_NODE_ABI 1u
#define DAGSERVE_MAX_RANK 4

#if defined(__cplusplus)
#define DAGSERVE_EXPORT extern "C" __attribute__((visibility("default")))
#else
#define DAGSERVE_EXPORT __attribute__((visibility("default")))
#endif

/* Element types, dagserve_tensor.dtype. Text is UTF-8; a lone surrogate may stand in it as its three bytes. */
enum {
  DAGSERVE_U8,
  DAGSERVE_BOOL,
  DAGSERVE_I32,
  DAGSERVE_I64,
  DAGSERVE_F16,
  DAGSERVE_BF16,
  DAGSERVE_F32,
  DAGSERVE_TEXT
};

/* Outcomes of a run, dagserve_status.code. */
enum {
  DAGSERVE_OK = 0,
  DAGSERVE_INVALID_REQUEST = 1, /* the request's fault: HTTP 400; the message says which field and how to fix it */
  DAGSERVE_INTERNAL = 6         /* the node's fault: HTTP 500 */
};

/* A tensor, row-major and contiguous. For text, `data` is the payload of all rows and row i is the bytes from
 * offsets[i] to offsets[i + 1]; a scalar has one row. A node sets `shape`, and for text `offsets`, of its outputs,
 * within `bound` and `capacity`. */
typedef struct dagserve_tensor {
  void* data;       /* 64-byte aligned */
  int64_t* offsets; /* text only: rows + 1 byte offsets */
  uint8_t dtype;
  uint8_t present; /* 0: an optional input that the request left out */
  int32_t rank;
  int64_t shape[DAGSERVE_MAX_RANK]; /* sizes in this request */
  int64_t bound[DAGSERVE_MAX_RANK]; /* largest sizes */
  int64_t capacity;                 /* bytes at `data` */
} dagserve_tensor;

typedef struct dagserve_status {
  uint8_t code;      /* DAGSERVE_OK when given to a node */
  char node[64];     /* filled in by the runtime */
  char message[512]; /* UTF-8, ends with a zero byte */
} dagserve_status;

/* A port of the node and the tensor of the graph that is connected to it. */
typedef struct dagserve_port {
  const char* name;
  const char* tensor;    /* a request input's name or `node.port`; "" where an optional port is not connected */
  dagserve_tensor bound; /* dtype, rank and largest sizes; data is null */
} dagserve_port;

/* What a node is created from. Everything it points to is gone when `create` returns. */
typedef struct dagserve_config {
  uint32_t abi;        /* DAGSERVE_NODE_ABI of the runtime */
  const char* op;      /* the node's name in its library */
  const char* root;    /* the artifact's directory */
  const char* options; /* a JSON object: what `configure` of the node's definition returned, or the manifest's `with` */
  size_t input_count;
  const dagserve_port* inputs;
  size_t output_count;
  const dagserve_port* outputs;
} dagserve_config;

typedef struct dagserve_cpu_node {
  const char* op;
  /* Returns the node, or null with `status` filled in. May allocate and read files. */
  void* (*create)(const dagserve_config* config, dagserve_status* status);
  void (*destroy)(void* node);
  /* Bytes of scratch memory each run gets, 64-byte aligned, its content undefined. */
  size_t (*workspace_bytes)(const void* node);
  void (*run)(const void* node, const dagserve_tensor* inputs, size_t input_count, dagserve_tensor* outputs,
              size_t output_count, void* workspace, size_t workspace_bytes, dagserve_status* status);
} dagserve_cpu_node;

typedef struct dagserve_library {
  uint32_t abi; /* DAGSERVE_NODE_ABI */
  size_t node_count;
  const dagserve_cpu_node* nodes;
} dagserve_library;

/* The one symbol of a library. What it returns stays valid for ever. */
DAGSERVE_EXPORT const dagserve_library* dagserve_nodes(void);

#endif
