// A request's JSON body into the tensors of its slot: off the event loop, without Python, one object for each thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "dagserve/plan.h"

namespace dagserve {

// One field of an endpoint's body; a dot in `path` goes into an object. Where there is a field of the object's own path
// too, that is what anything but an object stands for. dagserve/endpoints.py says what each is for.
struct FieldSpec {
  enum class Kind : std::uint8_t {
    input,     // becomes the plan's input of that index
    model,     // must be `expected`, the served name
    constant,  // must be `expected`, a JSON scalar; `reason` says why
    fixed,     // may not be given: the manifest fixes it
    ignored,
    term,  // values of an attribute of the kind `expected`, which go to the text input of that index as NAME=VALUE
  };

  std::string path;
  Kind kind = Kind::ignored;
  int input = -1;
  bool one_or_many = false;  // a value alone is a list of one
  std::string expected;
  std::string reason;
  bool empty_is_absent = false;  // an empty list says no more than none
};

struct EndpointSpec {
  std::string name;
  std::vector<FieldSpec> fields;
};

// Readable bytes that must follow a body.
constexpr std::size_t kBodyPadding = 64;

// The largest body of a plan in bytes: every input full and every byte escaped, and room for the fields themselves.
std::size_t body_limit(const Plan& plan);

// Writes the defaults of an input that a request leaves out.
void fill_default(const InputSpec& input, Tensor& tensor) noexcept;

// Stores an integer or boolean; `integer_fits` says whether it is one of the tensor's type.
void store_integer(Tensor& tensor, std::int64_t index, std::int64_t value) noexcept;
bool integer_fits(Dtype dtype, std::int64_t value) noexcept;

class RequestDecoder {
 public:
  // Allocates all it will need for bodies within the plan's limit. `plan` and `endpoints` outlive it.
  RequestDecoder(const Plan& plan, std::span<const EndpointSpec> endpoints);
  ~RequestDecoder();

  // Fills `inputs`, one for each of the plan's. `body` has kBodyPadding readable bytes behind it.
  // Fails with invalid_request, or unknown_model, and the field's place such as `items[3]`.
  void decode(int endpoint, std::string_view body, std::span<Tensor> inputs, Status& status) noexcept;

  // Bytes one decoder holds.
  static std::size_t bytes(const Plan& plan);

 private:
  struct Parser;
  std::unique_ptr<Parser> parser_;
};

}  // namespace dagserve
