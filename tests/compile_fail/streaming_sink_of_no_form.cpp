// expect: kvtrim::StreamingSink: Form must be SinkForm::pages or SinkForm::exact
// SPDX-License-Identifier: Apache-2.0
// A number that is none of the forms.
#include <kvtrim/policy/streaming_sink.hpp>

#if defined(KVTRIM_TEST_VALID)
kvtrim::StreamingSink<kvtrim::SinkForm::exact> made;
#else
kvtrim::StreamingSink<static_cast<kvtrim::SinkForm>(7)> made;
#endif
