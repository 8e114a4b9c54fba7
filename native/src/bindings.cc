// The only file that knows Python: plan dictionaries to structs, Python values into request slots, results out.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "allocations.h"
#include "runtime.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace dagserve {
namespace {

[[noreturn]] void raise(const char* type, const std::string& message, const char* node = "") {
  const nb::object cls = nb::module_::import_("dagserve.errors").attr(type);
  PyErr_SetObject(cls.ptr(), cls(message, node).ptr());
  throw nb::python_error();
}

[[noreturn]] void raise(const Status& status) {
  constexpr const char* kTypes[] = {"InternalError", "InvalidRequest", "Overloaded",    "DeadlineExceeded",
                                    "Cancelled",     "Draining",       "InternalError", "UnknownModel"};
  raise(kTypes[static_cast<int>(status.code)], status.message, status.node);
}

extern const dagserve_cpu_node kPythonNode;

// ---- plan ----------------------------------------------------------------------------------------------------------

Dtype parse_dtype(const std::string& name) {
  for (int i = 0; i <= static_cast<int>(Dtype::f8e4m3); ++i)
    if (name == dtype_name(static_cast<Dtype>(i))) return static_cast<Dtype>(i);
  throw std::invalid_argument("plan: unknown dtype " + name);
}

template <class T>
T get(const nb::dict& dict, const char* key) {
  if (!dict.contains(key)) throw std::invalid_argument(std::string("plan: missing key ") + key);
  return nb::cast<T>(dict[key]);
}

std::vector<Dim> parse_dims(nb::handle dims) {
  std::vector<Dim> result;
  for (nb::handle dim : dims) {
    const auto [symbol, add] = nb::cast<std::tuple<int, std::int64_t>>(dim);
    result.push_back({symbol, add});
  }
  return result;
}

int index_or_none(nb::handle value) { return value.is_none() ? -1 : nb::cast<int>(value); }

std::vector<int> parse_ports(const nb::dict& ports, const Plan& plan, std::vector<PortSpec>& specs) {
  std::vector<int> tensors;
  for (auto [name, tensor] : ports) {
    const int index = index_or_none(tensor);
    const bool known = index >= 0 && static_cast<std::size_t>(index) < plan.tensors.size();
    tensors.push_back(index);
    specs.push_back({nb::cast<std::string>(name), known ? plan.tensors[index].name : "",
                     known ? describe_tensor(plan, plan.tensors[index]) : Tensor{.present = false}});
  }
  return tensors;
}

std::string json_of(nb::handle value) {
  return nb::cast<std::string>(nb::module_::import_("json").attr("dumps")(value));
}

Operand parse_operand(const nb::dict& dict) {
  if (dict.contains("tensor")) return {.kind = Operand::Kind::tensor, .index = get<int>(dict, "tensor")};
  if (dict.contains("local")) return {.kind = Operand::Kind::local, .index = get<int>(dict, "local")};
  Operand operand;
  if (dict.contains("scalar")) {
    const auto scalar = get<nb::dict>(dict, "scalar");
    operand.kind = Operand::Kind::scalar;
    operand.index = index_or_none(scalar["tensor"]);
    operand.scalar = static_cast<float>(get<double>(scalar, "default"));
  } else if (dict.contains("row")) {
    const auto row = get<nb::dict>(dict, "row");
    operand.kind = Operand::Kind::row;
    operand.index = get<int>(row, "tensor");
    operand.ends = get<int>(row, "ends");
    operand.row = get<int>(row, "index");
  } else if (dict.contains("count")) {
    const auto count = get<nb::dict>(dict, "count");
    operand.kind = Operand::Kind::count;
    operand.index = index_or_none(count["tensor"]);
    operand.bound = get<std::int64_t>(count, "default");
    if (count.contains("at_most")) {
      const auto limit = get<nb::dict>(count, "at_most");
      operand.at_most = index_or_none(limit["tensor"]);
      operand.at_most_default = get<std::int64_t>(limit, "default");
    }
  } else {
    const auto iota = get<nb::dict>(dict, "iota");
    operand.kind = Operand::Kind::iota;
    operand.index = get<int>(iota, "max_length_of");
    operand.bound = get<std::int64_t>(iota, "bound");
    const auto rows = iota.contains("rows") ? get<std::string>(iota, "rows") : "all";
    if (rows != "all") operand.rows = rows == "first" ? Operand::Rows::first : Operand::Rows::rest;
  }
  return operand;
}

CallSpec parse_call(const nb::dict& dict) {
  CallSpec call;
  call.package = get<int>(dict, "package");
  for (nb::handle operand : get<nb::list>(dict, "inputs"))
    call.inputs.push_back(parse_operand(nb::cast<nb::dict>(operand)));
  for (nb::handle operand : get<nb::list>(dict, "outputs"))
    call.outputs.push_back(parse_operand(nb::cast<nb::dict>(operand)));
  if (dict.contains("when")) {
    const auto when = get<nb::dict>(dict, "when");
    (when.contains("local") ? call.when_local : call.when) =
        get<int>(when, when.contains("local") ? "local" : "tensor");
    call.equals = get<std::int64_t>(when, "equals");
    call.when_default = get<std::int64_t>(when, "default");
  }
  return call;
}

CheckSpec parse_check(const nb::dict& dict) {
  CheckSpec check;
  if (get<std::string>(dict, "kind") == "packed") {
    check.kind = CheckSpec::Kind::packed;
    check.tensor = get<int>(dict, "tokens");
    check.cu_seqlens = get<int>(dict, "cu_seqlens");
    check.max_length = get<std::int64_t>(dict, "max_length");
    check.shared = dict.contains("shared");
  } else if (get<std::string>(dict, "kind") == "at_most") {
    check.kind = CheckSpec::Kind::at_most;
    check.tensor = get<int>(dict, "tensor");
    check.other = get<int>(dict, "other");
  } else {
    check.tensor = get<int>(dict, "tensor");
    check.low = get<std::int64_t>(dict, "low");
    check.high = get<std::int64_t>(dict, "high");
  }
  return check;
}

NodeSpec parse_node(const Plan& plan, const nb::dict& dict) {
  NodeSpec node;
  node.name = get<std::string>(dict, "name");
  node.aoti = get<std::string>(dict, "engine") == "aoti";
  node.config.op = get<std::string>(dict, "op");
  node.config.root = plan.root;
  node.inputs = parse_ports(get<nb::dict>(dict, "inputs"), plan, node.config.inputs);
  node.outputs = parse_ports(get<nb::dict>(dict, "outputs"), plan, node.config.outputs);
  if (dict.contains("config")) node.config.options = json_of(dict["config"]);
  if (dict.contains("native_op")) node.config.op = get<std::string>(dict, "native_op");
  if (dict.contains("library")) node.library = plan.root + "/" + get<std::string>(dict, "library");
  if (dict.contains("python") && get<bool>(dict, "python")) node.foreign = &kPythonNode;
  if (dict.contains("checks"))
    for (nb::handle check : get<nb::list>(dict, "checks"))
      node.checks.push_back(parse_check(nb::cast<nb::dict>(check)));
  if (dict.contains("calls"))
    for (nb::handle call : get<nb::list>(dict, "calls")) node.calls.push_back(parse_call(nb::cast<nb::dict>(call)));
  for (const CallSpec& call : node.calls)
    for (const auto* operands : {&call.inputs, &call.outputs})
      for (const Operand& operand : *operands)
        if (operand.kind == Operand::Kind::local) node.locals = std::max(node.locals, operand.index + 1);
  return node;
}

InputSpec parse_input(const Plan& plan, const nb::dict& dict) {
  InputSpec input;
  input.name = get<std::string>(dict, "name");
  input.tensor = get<int>(dict, "tensor");
  input.optional = get<bool>(dict, "optional");
  nb::object value = nb::borrow(dict["default"]);
  if (value.is_none()) return input;
  input.has_default = true;
  if (!nb::isinstance<nb::list>(value)) {
    nb::list one;
    one.append(value);
    value = one;
  }
  const Dtype dtype = plan.tensors.at(static_cast<std::size_t>(input.tensor)).dtype;
  if (dtype == Dtype::text) {
    input.texts = nb::cast<std::vector<std::string>>(value);
  } else if (dtype == Dtype::f32) {
    input.reals = nb::cast<std::vector<double>>(value);
  } else {
    for (nb::handle item : value) input.integers.push_back(nb::cast<std::int64_t>(nb::int_(item)));
  }
  return input;
}

std::vector<PackagePort> parse_package_ports(const nb::list& ports) {
  std::vector<PackagePort> result;
  for (nb::handle item : ports) {
    const auto dict = nb::cast<nb::dict>(item);
    result.push_back(
        {get<std::string>(dict, "name"), parse_dtype(get<std::string>(dict, "dtype")), parse_dims(dict["shape"])});
  }
  return result;
}

PackageSpec parse_package(const nb::dict& dict) {
  PackageSpec package;
  package.name = get<std::string>(dict, "name");
  package.path = get<std::string>(dict, "path");
  package.inputs = parse_package_ports(get<nb::list>(dict, "inputs"));
  package.outputs = parse_package_ports(get<nb::list>(dict, "outputs"));
  for (auto [name, weight] : get<nb::dict>(dict, "constants"))
    package.constants.emplace_back(nb::cast<std::string>(name), nb::cast<std::string>(weight));
  return package;
}

void parse_weights(const nb::dict& dict, Plan& plan) {
  plan.weights_path = get<std::string>(dict, "path");
  plan.weights_bytes = get<std::int64_t>(dict, "bytes");
  for (auto [name, item] : get<nb::dict>(dict, "tensors")) {
    const auto entry = nb::cast<nb::dict>(item);
    plan.weights.push_back({nb::cast<std::string>(name), parse_dtype(get<std::string>(entry, "dtype")),
                            get<std::vector<std::int64_t>>(entry, "shape"), get<std::int64_t>(entry, "offset"),
                            get<std::int64_t>(entry, "bytes")});
  }
}

// The dictionary is plan.json with every dim as a pair (symbol index or -1, integer).
Plan parse_plan(const nb::dict& dict, const std::string& root) {
  Plan plan;
  plan.root = root;
  for (nb::handle item : get<nb::list>(dict, "symbols")) {
    const auto symbol = nb::cast<nb::dict>(item);
    plan.symbols.push_back({get<std::string>(symbol, "name"), get<std::int64_t>(symbol, "bound")});
  }
  for (nb::handle item : get<nb::list>(dict, "tensors")) {
    const auto tensor = nb::cast<nb::dict>(item);
    plan.tensors.push_back({get<std::string>(tensor, "name"), parse_dtype(get<std::string>(tensor, "dtype")),
                            parse_dims(tensor["shape"]), get<std::int64_t>(tensor, "capacity"),
                            tensor.contains("borrowed")});
  }
  for (nb::handle item : get<nb::list>(dict, "packages"))
    plan.packages.push_back(parse_package(nb::cast<nb::dict>(item)));
  for (nb::handle item : get<nb::list>(dict, "inputs"))
    plan.inputs.push_back(parse_input(plan, nb::cast<nb::dict>(item)));
  for (nb::handle item : get<nb::list>(dict, "nodes")) plan.nodes.push_back(parse_node(plan, nb::cast<nb::dict>(item)));
  for (nb::handle item : get<nb::list>(dict, "outputs"))
    if (get<std::string>(nb::cast<nb::dict>(item), "name") == "response")
      plan.response = get<int>(nb::cast<nb::dict>(item), "tensor");
  parse_weights(get<nb::dict>(dict, "weights"), plan);
  const auto concurrency = get<nb::dict>(dict, "concurrency");
  plan.runners = get<int>(concurrency, "runners");
  plan.contexts = get<int>(concurrency, "contexts");
  plan.in_flight = get<int>(concurrency, "in_flight");
  const auto admission = get<nb::dict>(dict, "admission");
  plan.max_queued = get<int>(admission, "max_queued");
  plan.max_wait_s = get<double>(admission, "max_wait_ms") / 1000;
  plan.deadline_s = get<double>(admission, "deadline_ms") / 1000;
  return plan;
}

// ---- values into tensors -------------------------------------------------------------------------------------------

struct Bytes {
  nb::object owner;
  const char* data;
  std::size_t size;
};

// Where a value stands in a request. Its text is made only for an error.
struct Place {
  const std::string& name;
  std::int64_t row = -1;

  std::string text() const { return row < 0 ? name : name + "[" + std::to_string(row) + "]"; }
};

// A lone surrogate passes as its three bytes, so that the node that reads the text reports it with its place.
Bytes utf8(const Place& place, nb::handle value) {
  nb::object owner = nb::borrow(value);
  Py_ssize_t size = 0;
  if (nb::isinstance<nb::str>(value)) {
    if (const char* data = PyUnicode_AsUTF8AndSize(value.ptr(), &size))
      return {owner, data, static_cast<std::size_t>(size)};
    PyErr_Clear();
    owner = value.attr("encode")("utf-8", "surrogatepass");
  } else if (!nb::isinstance<nb::bytes>(value)) {
    raise("InvalidRequest", place.text() + " must be text");
  }
  return {owner, PyBytes_AS_STRING(owner.ptr()), static_cast<std::size_t>(PyBytes_GET_SIZE(owner.ptr()))};
}

bool is_sequence(nb::handle value) { return nb::isinstance<nb::list>(value) || nb::isinstance<nb::tuple>(value); }

// The number of rows a value gives a tensor of rank 1, within the bound. Single nodes take none too: they check it.
std::int64_t check_rows(const std::string& name, nb::handle value, const Tensor& tensor, std::int64_t least) {
  if (!is_sequence(value)) raise("InvalidRequest", name + " must be a list");
  const auto rows = static_cast<std::int64_t>(nb::len(value));
  if (rows < least || rows > tensor.bound[0])
    raise("InvalidRequest", name + " has " + std::to_string(rows) + " entries; it must have from 1 to " +
                                std::to_string(tensor.bound[0]));
  return rows;
}

void append_text(const Place& place, nb::handle value, Tensor& tensor, std::int64_t row) {
  const Bytes text = utf8(place, value);
  const std::int64_t start = tensor.offsets[row];
  if (text.size > static_cast<std::size_t>(tensor.capacity - start))
    raise("InvalidRequest", place.name + " has more than " + std::to_string(tensor.capacity) +
                                " bytes of text; shorten it or raise the input's max_bytes");
  std::memcpy(static_cast<char*>(tensor.data) + start, text.data, text.size);
  tensor.offsets[row + 1] = start + static_cast<std::int64_t>(text.size);
}

void fill_text(const std::string& name, nb::handle value, Tensor& tensor, std::int64_t least) {
  tensor.offsets[0] = 0;
  if (tensor.rank == 0) {
    append_text({name}, value, tensor, 0);
    return;
  }
  tensor.shape[0] = check_rows(name, value, tensor, least);
  std::int64_t row = 0;
  for (nb::handle item : value) {
    append_text({name, row}, item, tensor, row);
    ++row;
  }
}

std::int64_t integer(const Place& place, nb::handle value, const Tensor& tensor) {
  if (tensor.dtype == Dtype::boolean) {
    if (!nb::isinstance<nb::bool_>(value)) raise("InvalidRequest", place.text() + " must be true or false");
    return nb::cast<bool>(value) ? 1 : 0;
  }
  int overflow = 0;
  const bool whole = nb::isinstance<nb::int_>(value) && !nb::isinstance<nb::bool_>(value);
  const long long number = whole ? PyLong_AsLongLongAndOverflow(value.ptr(), &overflow) : 0;
  if (!whole || overflow != 0 || !integer_fits(tensor.dtype, number))
    raise("InvalidRequest", place.text() + " must be an integer of type " + dtype_name(tensor.dtype));
  return number;
}

void store_one(const Place& place, nb::handle value, Tensor& tensor, std::int64_t index) {
  if (tensor.dtype != Dtype::f32) return store_integer(tensor, index, integer(place, value, tensor));
  double number = 0;
  if (nb::isinstance<nb::bool_>(value) || !nb::try_cast<double>(value, number))
    raise("InvalidRequest", place.text() + " must be a number");
  tensor.as<float>()[index] = static_cast<float>(number);
}

using Array = nb::ndarray<nb::c_contig, nb::device::cpu, nb::ro>;

bool same_dtype(nb::dlpack::dtype given, Dtype dtype) {
  using Kind = nb::dlpack::dtype_code;
  const bool floating = dtype == Dtype::f32 || dtype == Dtype::f16;
  const Kind kind = floating                  ? Kind::Float
                    : dtype == Dtype::boolean ? Kind::Bool
                    : dtype == Dtype::u8      ? Kind::UInt
                                              : Kind::Int;
  return given.code == static_cast<std::uint8_t>(kind) && given.bits == 8 * dtype_bytes(dtype);
}

// A numpy array (or anything with the buffer protocol) of the tensor's dtype and rank.
void fill_array(const std::string& name, const Array& array, Tensor& tensor) {
  if (static_cast<int>(array.ndim()) != tensor.rank || !same_dtype(array.dtype(), tensor.dtype))
    raise("InvalidRequest",
          name + " must be an array of type " + dtype_name(tensor.dtype) + " and rank " + std::to_string(tensor.rank));
  if (array.nbytes() > static_cast<std::size_t>(tensor.capacity))
    raise("InvalidRequest", name + " has " + std::to_string(array.nbytes()) + " bytes; it must have at most " +
                                std::to_string(tensor.capacity));
  for (int i = 0; i < tensor.rank; ++i) tensor.shape[i] = static_cast<std::int64_t>(array.shape(i));
  std::memcpy(tensor.data, array.data(), array.nbytes());
}

void fill_numbers(const std::string& name, nb::handle value, Tensor& tensor, std::int64_t least) {
  if (Array array; nb::try_cast<Array>(value, array)) return fill_array(name, array, tensor);
  if (tensor.rank == 0) return store_one({name}, value, tensor, 0);
  if (tensor.rank != 1) raise("InvalidRequest", name + " has a rank that requests cannot carry");
  tensor.shape[0] = check_rows(name, value, tensor, least);
  std::int64_t index = 0;
  for (nb::handle item : value) {
    store_one({name, index}, item, tensor, index);
    ++index;
  }
}

void fill_input(const InputSpec& input, const nb::dict& values, Tensor& tensor, std::int64_t least = 1) {
  const nb::str key(input.name.c_str());
  const bool given = values.contains(key) && !values[key].is_none();
  tensor.present = given || input.has_default;
  if (given) {
    const nb::object value = nb::borrow(values[key]);
    tensor.dtype == Dtype::text ? fill_text(input.name, value, tensor, least)
                                : fill_numbers(input.name, value, tensor, least);
  } else if (input.has_default) {
    fill_default(input, tensor);
  } else if (!input.optional) {
    raise("InvalidRequest", input.name + " is missing");
  }
}

void fill_slot(const Plan& plan, const nb::dict& values, Slot& slot) {
  for (std::size_t i = 0; i < plan.inputs.size(); ++i) fill_input(plan.inputs[i], values, slot.inputs[i]);
  for (auto [key, value] : values) {
    const auto name = nb::cast<std::string>(key);
    if (std::ranges::find(plan.inputs, name, &InputSpec::name) == plan.inputs.end())
      raise("InvalidRequest", name + " is not an input of this graph");
  }
}

// ---- tensors into values -------------------------------------------------------------------------------------------

nb::object numpy_array(const Tensor& tensor) {
  constexpr const char* kNames[] = {"uint8", "bool", "int32", "int64", "float16", "uint16", "float32"};
  const nb::module_ numpy = nb::module_::import_("numpy");
  const auto bytes = static_cast<std::size_t>(tensor.numel()) * dtype_bytes(tensor.dtype);
  nb::list shape;
  for (int i = 0; i < tensor.rank; ++i) shape.append(tensor.shape[i]);
  const nb::object flat = numpy.attr("frombuffer")(nb::bytes(static_cast<const char*>(tensor.data), bytes),
                                                   kNames[static_cast<int>(tensor.dtype)]);
  return flat.attr("reshape")(nb::tuple(shape));
}

nb::object python_value(const Tensor& tensor) {
  if (!tensor.present) return nb::none();
  if (tensor.dtype != Dtype::text) return numpy_array(tensor);
  nb::list rows;
  for (std::int64_t row = 0; row < tensor.rows(); ++row)
    rows.append(nb::bytes(tensor.text(row).data(), tensor.text(row).size()));
  if (tensor.rank == 0) return nb::object(rows[0]);
  return nb::object(rows);
}

// ---- nodes in Python -----------------------------------------------------------------------------------------------

// A node whose definition runs in Python, under the interpreter's lock: for prototypes.
struct PythonNode {
  nb::object self;
  std::vector<std::string> inputs;
  std::vector<std::string> outputs;
};

// A tensor as a definition's `run` takes it: text as str, everything else as a numpy array.
nb::object definition_value(const Tensor& tensor) {
  if (!tensor.present || tensor.dtype != Dtype::text) return python_value(tensor);
  nb::list rows;
  for (std::int64_t row = 0; row < tensor.rows(); ++row) {
    const std::string_view text = tensor.text(row);
    rows.append(nb::steal(PyUnicode_DecodeUTF8(text.data(), std::ssize(text), "surrogatepass")));
  }
  return tensor.rank == 0 ? nb::object(rows[0]) : nb::object(rows);
}

void take_output(const std::string& name, nb::handle value, Tensor& tensor) {
  Array array;
  if (tensor.dtype == Dtype::text) {
    fill_text(name, value, tensor, 0);
  } else if (nb::try_cast<Array>(value, array)) {
    fill_array(name, array, tensor);
  } else {
    throw std::invalid_argument(name + " must be a numpy array of type " + dtype_name(tensor.dtype));
  }
}

void run_python(const PythonNode& node, std::span<const Tensor> inputs, std::span<Tensor> outputs) {
  nb::dict given;
  for (std::size_t i = 0; i < inputs.size(); ++i) given[node.inputs[i].c_str()] = definition_value(inputs[i]);
  const auto results = nb::cast<nb::dict>(node.self.attr("run")(given));
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const nb::str key(node.outputs[i].c_str());
    if (!results.contains(key)) throw std::invalid_argument("run() returned no output " + node.outputs[i]);
    take_output(node.outputs[i], results[key], outputs[i]);
  }
}

// An exception's class and text as a status: a request's fault where it is an InvalidRequest.
void fail_with(const nb::python_error& error, const char* op, Status& status) {
  const bool invalid = error.matches(nb::module_::import_("dagserve.errors").attr("InvalidRequest"));
  const auto text = nb::cast<std::string>(nb::str(error.value()));
  const auto type = nb::cast<std::string>(error.type().attr("__name__"));
  if (invalid) return status.fail(Code::invalid_request, "%s", text.c_str());
  status.fail(Code::internal, "[%s] %s: %s", op, type.c_str(), text.c_str());
}

template <class Work>
void reporting(const char* op, dagserve_status* result, Work work) {
  Status& status = *reinterpret_cast<Status*>(result);
  try {
    work();
  } catch (const nb::python_error& error) {
    fail_with(error, op, status);
  } catch (const std::exception& error) {
    status.fail(Code::internal, "[%s] %s", op, error.what());
  }
}

nb::object import_definition(const std::string& module) {
  try {
    return nb::module_::import_(module.c_str());
  } catch (const nb::python_error& error) {
    throw std::runtime_error("cannot import " + module + " (" + nb::cast<std::string>(nb::str(error.value())) +
                             "); install it where the artifact is served, or set PYTHONPATH");
  }
}

nb::object make_definition(const dagserve_config& config) {
  const std::string op = config.op;
  const std::size_t colon = op.find(':');
  const nb::object cls = import_definition(op.substr(0, colon)).attr(op.substr(colon + 1).c_str());
  const nb::object options = nb::module_::import_("json").attr("loads")(config.options);
  return cls(options, nb::module_::import_("pathlib").attr("Path")(config.root));
}

const dagserve_cpu_node kPythonNode = {
    "python",
    [](const dagserve_config* config, dagserve_status* status) -> void* {
      const nb::gil_scoped_acquire locked;
      auto node = std::make_unique<PythonNode>();
      reporting(config->op, status, [&] { node->self = make_definition(*config); });
      if (status->code != DAGSERVE_OK) return nullptr;
      for (std::size_t i = 0; i < config->input_count; ++i) node->inputs.emplace_back(config->inputs[i].name);
      for (std::size_t i = 0; i < config->output_count; ++i) node->outputs.emplace_back(config->outputs[i].name);
      return node.release();
    },
    [](void* node) {
      const nb::gil_scoped_acquire locked;
      delete static_cast<PythonNode*>(node);
    },
    [](const void*) { return std::size_t{0}; },
    [](const void* node, const dagserve_tensor* inputs, std::size_t input_count, dagserve_tensor* outputs,
       std::size_t output_count, void*, std::size_t, dagserve_status* status) {
      const nb::gil_scoped_acquire locked;
      reporting("python", status, [&] {
        run_python(*static_cast<const PythonNode*>(node), {reinterpret_cast<const Tensor*>(inputs), input_count},
                   {reinterpret_cast<Tensor*>(outputs), output_count});
      });
    },
};

// ---- runtime -------------------------------------------------------------------------------------------------------

// Ends its threads without holding the interpreter's lock, for which a node in Python may be waiting.
struct PythonRuntime : Runtime {
  using Runtime::Runtime;
  ~PythonRuntime() {
    const nb::gil_scoped_release released;
    stop();
  }
};

nb::bytes body(const Slot& slot) {
  return nb::bytes(static_cast<const char*>(slot.response.data), static_cast<std::size_t>(slot.response.shape[0]));
}

FieldSpec parse_field(const Plan& plan, const nb::dict& dict) {
  using Kind = FieldSpec::Kind;
  constexpr std::pair<const char*, Kind> kKinds[] = {{"input", Kind::input},       {"model", Kind::model},
                                                     {"constant", Kind::constant}, {"fixed", Kind::fixed},
                                                     {"ignored", Kind::ignored},   {"term", Kind::term}};
  FieldSpec field;
  field.path = get<std::string>(dict, "path");
  const auto* const kind = std::ranges::find(kKinds, get<std::string>(dict, "kind"), [](auto& k) { return k.first; });
  if (kind == std::end(kKinds)) throw std::invalid_argument("endpoint: unknown kind of field " + field.path);
  field.kind = kind->second;
  field.one_or_many = get<bool>(dict, "one_or_many");
  field.empty_is_absent = get<bool>(dict, "empty_is_absent");
  field.expected = get<std::string>(dict, "expected");
  field.reason = get<std::string>(dict, "reason");
  if (field.kind != Kind::input && field.kind != Kind::term) return field;
  const auto input = std::ranges::find(plan.inputs, get<std::string>(dict, "input"), &InputSpec::name);
  if (input == plan.inputs.end()) throw std::invalid_argument("endpoint: " + field.path + " is no input of the graph");
  field.input = static_cast<int>(input - plan.inputs.begin());
  return field;
}

std::vector<EndpointSpec> parse_endpoints(const Plan& plan, const nb::dict& endpoints) {
  std::vector<EndpointSpec> result;
  for (auto [name, fields] : endpoints) {
    EndpointSpec endpoint{nb::cast<std::string>(name), {}};
    for (nb::handle field : nb::cast<nb::list>(fields))
      endpoint.fields.push_back(parse_field(plan, nb::cast<nb::dict>(field)));
    result.push_back(std::move(endpoint));
  }
  return result;
}

Slot& reserve_body(PythonRuntime& runtime, const std::string& endpoint, const nb::bytes& body,
                   const std::string& request_id = {}) {
  const int index = runtime.endpoint(endpoint);
  if (index < 0) raise("InvalidRequest", "this service has no endpoint '" + endpoint + "'");
  if (body.size() > body_limit(runtime.plan()))
    raise("InvalidRequest", "the body is larger than " + std::to_string(body_limit(runtime.plan())) +
                                " bytes; send fewer or shorter texts");
  Status status;
  Slot* slot = runtime.reserve(status);
  if (slot == nullptr) raise(status);
  runtime.set_body(*slot, index, {body.c_str(), body.size()}, request_id);
  return *slot;
}

Slot& reserve_filled(PythonRuntime& runtime, const nb::dict& inputs) {
  Status status;
  Slot* slot = runtime.reserve(status);
  if (slot == nullptr) raise(status);
  try {
    fill_slot(runtime.plan(), inputs, *slot);
  } catch (...) {
    runtime.abandon(*slot);
    throw;
  }
  return *slot;
}

double deadline_of(const PythonRuntime& runtime, std::optional<double> deadline_s) {
  return std::min(deadline_s.value_or(runtime.plan().deadline_s), runtime.plan().deadline_s);
}

Ticket submit(PythonRuntime& runtime, const nb::dict& inputs, std::optional<double> deadline_s) {
  Slot& slot = reserve_filled(runtime, inputs);
  return runtime.start(slot, deadline_of(runtime, deadline_s), false);
}

Ticket submit_body(PythonRuntime& runtime, const std::string& endpoint, const nb::bytes& content,
                   std::optional<double> deadline_s, const std::string& request_id) {
  Slot& slot = reserve_body(runtime, endpoint, content, request_id);
  return runtime.start(slot, deadline_of(runtime, deadline_s), false);
}

struct Release {
  PythonRuntime& runtime;
  Slot& slot;
  ~Release() { runtime.release(slot); }
};

nb::bytes run_slot(PythonRuntime& runtime, Slot& slot, double deadline_s) {
  {
    nb::gil_scoped_release released;
    runtime.start(slot, deadline_s, true);
    runtime.wait(slot);
  }
  const Release release{runtime, slot};
  if (!slot.status.ok()) raise(slot.status);
  return body(slot);
}

nb::bytes run(PythonRuntime& runtime, const nb::dict& inputs, std::optional<double> deadline_s) {
  return run_slot(runtime, reserve_filled(runtime, inputs), deadline_s.value_or(runtime.plan().deadline_s));
}

nb::bytes run_body(PythonRuntime& runtime, const std::string& endpoint, const nb::bytes& content) {
  return run_slot(runtime, reserve_body(runtime, endpoint, content), runtime.plan().deadline_s);
}

struct Copied {
  Tensor tensor;
  std::vector<std::byte> data;
  std::vector<std::int64_t> offsets;
};

Copied copy_tensor(const Tensor& tensor) {
  Copied copy{tensor, {}, {}};
  if (!tensor.present) return copy;
  const bool text = tensor.dtype == Dtype::text;
  const std::int64_t bytes =
      text ? tensor.offsets[tensor.rows()] : tensor.numel() * static_cast<std::int64_t>(dtype_bytes(tensor.dtype));
  const auto* start = static_cast<const std::byte*>(tensor.data);
  copy.data.assign(start, start + bytes);
  if (text) copy.offsets.assign(tensor.offsets, tensor.offsets + tensor.rows() + 1);
  copy.tensor.data = copy.data.data();
  copy.tensor.offsets = copy.offsets.data();
  return copy;
}

nb::dict trace(PythonRuntime& runtime, const nb::dict& inputs) {
  std::vector<Copied> copies;
  Slot& slot = reserve_filled(runtime, inputs);
  slot.trace = [&copies](const Context& context) {
    copies.reserve(context.tensors().size());
    for (const Tensor& tensor : context.tensors()) copies.push_back(copy_tensor(tensor));
  };
  {
    nb::gil_scoped_release released;
    runtime.start(slot, runtime.plan().deadline_s, true);
    runtime.wait(slot);
  }
  const Release release{runtime, slot};
  if (!slot.status.ok()) raise(slot.status);
  nb::dict result;
  for (std::size_t i = 0; i < copies.size(); ++i) {
    copies[i].tensor.data = copies[i].data.data();
    result[runtime.plan().tensors[i].name.c_str()] = python_value(copies[i].tensor);
  }
  return result;
}

nb::list completions(PythonRuntime& runtime) {
  nb::list result;
  while (Slot* slot = runtime.next_completion()) {
    const Release release{runtime, *slot};
    const bool good = slot->status.ok();
    result.append(nb::make_tuple(runtime.ticket(*slot), static_cast<int>(slot->status.code),
                                 good ? body(*slot) : nb::bytes(slot->status.message), slot->status.node));
  }
  return result;
}

nb::dict tier(const TierStats& stats) {
  nb::dict result;
  result["capacity"] = stats.capacity;
  result["used"] = stats.used;
  result["waiting"] = stats.waiting;
  return result;
}

nb::dict node_stats(const LoadedNode& node) {
  nb::dict result;
  result["runs"] = node.runs.load();
  result["seconds"] = static_cast<double>(node.nanoseconds.load()) * 1e-9;
  result["engine"] = node.spec->foreign ? "python" : node.cpu ? "cpu" : "aoti";
  if (allocations_counted()) result["allocations"] = node.allocations.load();
  return result;
}

nb::dict stats(const PythonRuntime& runtime) {
  const Stats now = runtime.stats();
  nb::dict tiers;
  tiers["in_flight"] = tier(now.in_flight);
  tiers["contexts"] = tier(now.contexts);
  nb::dict packages;
  TierStats runners;
  for (std::size_t i = 0; i < now.runners.size(); ++i) {
    packages[runtime.plan().packages[i].name.c_str()] = tier(now.runners[i]);
    runners.capacity += now.runners[i].capacity;
    runners.used += now.runners[i].used;
    runners.waiting += now.runners[i].waiting;
  }
  tiers["runners"] = tier(runners);
  nb::dict counters;
  counters["admitted"] = now.counters.admitted;
  counters["completed"] = now.counters.completed;
  counters["invalid"] = now.counters.invalid;
  counters["failed"] = now.counters.failed;
  counters["rejected"] = now.counters.rejected;
  counters["expired"] = now.counters.expired;
  counters["cancelled"] = now.counters.cancelled;
  nb::dict nodes;
  for (const auto& node : runtime.loaded().nodes) nodes[node->spec->name.c_str()] = node_stats(*node);
  nb::dict result;
  result["tiers"] = tiers;
  result["packages"] = packages;
  result["counters"] = counters;
  result["nodes"] = nodes;
  nb::dict decode;
  decode["runs"] = now.decoded;
  decode["seconds"] = static_cast<double>(now.decode_nanoseconds) * 1e-9;
  result["decode"] = decode;
  if (allocations_counted()) result["allocations_between_nodes"] = now.allocations_between_nodes;
  return result;
}

nb::dict memory(const PythonRuntime& runtime) {
  nb::dict result;
  result["context"] = runtime.context_bytes();
  result["slot"] = runtime.slot_bytes();
  result["slots"] = runtime.slot_count();
  return result;
}

// ---- one CPU node, for tests and tools -----------------------------------------------------------------------------

using PortBounds = std::tuple<std::string, std::string, std::vector<std::int64_t>, std::int64_t>;

class NodeRunner {
 public:
  NodeRunner(const std::string& op, const nb::dict& options, const std::vector<PortBounds>& inputs,
             const std::vector<PortBounds>& outputs, const std::string& root, const std::string& library) {
    NodeConfig config{.op = op, .root = root, .options = json_of(options), .inputs = {}, .outputs = {}};
    for (const PortBounds& port : inputs) add(port, plan_.inputs, config.inputs);
    for (const PortBounds& port : outputs) add(port, outputs_, config.outputs);
    node_ = std::make_unique<LoadedCpuNode>(find_cpu_node(op, library), config);
    bytes_ = node_->workspace_bytes() + 64;
    for (const TensorSpec& spec : plan_.tensors) bytes_ += tensor_bytes(plan_, spec) + 64;
  }

  nb::dict run(const nb::dict& values) const {
    return with_run(values, [this](const std::vector<Tensor>& outputs, Clock::duration) {
      nb::dict result;
      for (std::size_t i = 0; i < outputs.size(); ++i) result[outputs_[i].name.c_str()] = python_value(outputs[i]);
      return result;
    });
  }

  // Seconds of the node alone.
  double time(const nb::dict& values) const {
    return with_run(values, [](const std::vector<Tensor>&, Clock::duration taken) {
      return std::chrono::duration<double>(taken).count();
    });
  }

 private:
  // Runs the node; `use` takes the outputs and how long it took.
  template <class Use>
  std::invoke_result_t<Use, const std::vector<Tensor>&, Clock::duration> with_run(const nb::dict& values,
                                                                                  Use use) const {
    const Lease lease(*this);
    Arena& arena = *lease.arena;
    std::vector<Tensor> inputs;
    std::vector<Tensor> outputs;
    for (const InputSpec& input : plan_.inputs) {
      inputs.push_back(make_tensor(plan_, plan_.tensors[input.tensor], arena));
      fill_input(input, values, inputs.back(), 0);
    }
    for (const InputSpec& output : outputs_) {
      outputs.push_back(make_tensor(plan_, plan_.tensors[output.tensor], arena));
      outputs.back().present = true;
    }
    Status status;
    Clock::duration taken{};
    {
      nb::gil_scoped_release released;
      const std::size_t workspace = node_->workspace_bytes();
      const std::span<std::byte> scratch(arena.take(workspace), workspace);
      const Clock::time_point started = Clock::now();
      node_->run(inputs, outputs, scratch, status);
      taken = Clock::now() - started;
    }
    if (!status.ok()) raise(status);
    return use(outputs, taken);
  }

  void add(const PortBounds& port, std::vector<InputSpec>& ports, std::vector<PortSpec>& specs) {
    const auto& [name, dtype, shape, capacity] = port;
    TensorSpec spec{name, parse_dtype(dtype), {}, capacity};
    for (std::int64_t size : shape) spec.shape.push_back({-1, size});
    InputSpec input;
    input.name = name;
    input.tensor = static_cast<int>(plan_.tensors.size());
    input.optional = true;
    plan_.tensors.push_back(spec);
    ports.push_back(input);
    specs.push_back({name, name, describe_tensor(plan_, spec)});
  }

  // Buffers of one call, kept for the next: as a context's, they are ready before a request comes.
  struct Lease {
    explicit Lease(const NodeRunner& owner) : owner(owner) {
      const std::scoped_lock held(owner.mutex_);
      if (!owner.idle_.empty()) {
        arena = std::move(owner.idle_.back());
        owner.idle_.pop_back();
      } else {
        arena = std::make_unique<Arena>(owner.bytes_);
      }
    }
    ~Lease() {
      arena->clear();
      const std::scoped_lock held(owner.mutex_);
      owner.idle_.push_back(std::move(arena));
    }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;

    const NodeRunner& owner;
    std::unique_ptr<Arena> arena;
  };

  Plan plan_;
  std::vector<InputSpec> outputs_;
  std::unique_ptr<LoadedCpuNode> node_;
  std::size_t bytes_ = 0;
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<Arena>> idle_;
};

}  // namespace

NB_MODULE(_native, m) {
  nb::class_<PythonRuntime>(m, "Runtime")
      .def(
          "__init__",
          [](PythonRuntime* self, const nb::dict& plan, const std::string& root, const nb::dict& endpoints) {
            Plan parsed = parse_plan(plan, root);
            std::vector<EndpointSpec> bodies = parse_endpoints(parsed, endpoints);
            nb::gil_scoped_release released;
            new (self) PythonRuntime(std::move(parsed), std::move(bodies));
          },
          "plan"_a, "root"_a, "endpoints"_a)
      .def("submit_body", &submit_body, "endpoint"_a, "body"_a, "deadline_s"_a = nb::none(), "request_id"_a = "")
      .def("run_body", &run_body, "endpoint"_a, "body"_a)
      .def_prop_ro("body_limit", [](const PythonRuntime& self) { return body_limit(self.plan()); })
      .def("submit", &submit, "inputs"_a, "deadline_s"_a = nb::none())
      .def("run", &run, "inputs"_a, "deadline_s"_a = nb::none())
      .def("trace", &trace, "inputs"_a)
      .def("completions", &completions)
      .def(
          "cancel", [](PythonRuntime& self, Ticket ticket) { return self.cancel(ticket); }, "ticket"_a)
      .def(
          "replace_node",
          [](PythonRuntime& self, const std::string& name, const nb::dict& config) {
            const std::string options = json_of(config);
            nb::gil_scoped_release released;
            self.replace_node(name, options);
          },
          "name"_a, "config"_a)
      .def("fileno", [](const PythonRuntime& self) { return self.completion_fd(); })
      .def("stats", &stats)
      .def("memory", &memory)
      .def(
          "drain",
          [](PythonRuntime& self, double timeout_s) {
            nb::gil_scoped_release released;
            return self.drain(timeout_s);
          },
          "timeout_s"_a)
      .def("close", [](PythonRuntime& self) {
        nb::gil_scoped_release released;
        self.stop();
      });
  nb::class_<NodeRunner>(m, "CpuNode")
      .def(nb::init<const std::string&, const nb::dict&, const std::vector<PortBounds>&, const std::vector<PortBounds>&,
                    const std::string&, const std::string&>(),
           "op"_a, "config"_a, "inputs"_a, "outputs"_a, "root"_a, "library"_a = "")
      .def("run", &NodeRunner::run, "inputs"_a)
      .def("time", &NodeRunner::time, "inputs"_a);
}

}  // namespace dagserve
